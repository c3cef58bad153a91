from eldr.v1 import signature_pb2 as _signature_pb2
from eldr.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecoderState(_message.Message):
    __slots__ = ("worker_id", "incarnation", "sequence", "age_s", "running", "waiting", "kv_usage", "kv_tokens", "step_time_ewma_s", "step_time_last_s", "batch_last", "union_last", "hit_frequency", "layers", "experts", "reservation_ids", "draining", "placement_version", "totals")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_EWMA_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_LAST_S_FIELD_NUMBER: _ClassVar[int]
    BATCH_LAST_FIELD_NUMBER: _ClassVar[int]
    UNION_LAST_FIELD_NUMBER: _ClassVar[int]
    HIT_FREQUENCY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    sequence: int
    age_s: float
    running: int
    waiting: int
    kv_usage: float
    kv_tokens: int
    step_time_ewma_s: float
    step_time_last_s: float
    batch_last: int
    union_last: float
    hit_frequency: bytes
    layers: int
    experts: int
    reservation_ids: _containers.RepeatedScalarFieldContainer[str]
    draining: bool
    placement_version: int
    totals: DecoderTotals
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., sequence: _Optional[int] = ..., age_s: _Optional[float] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., kv_tokens: _Optional[int] = ..., step_time_ewma_s: _Optional[float] = ..., step_time_last_s: _Optional[float] = ..., batch_last: _Optional[int] = ..., union_last: _Optional[float] = ..., hit_frequency: _Optional[bytes] = ..., layers: _Optional[int] = ..., experts: _Optional[int] = ..., reservation_ids: _Optional[_Iterable[str]] = ..., draining: _Optional[bool] = ..., placement_version: _Optional[int] = ..., totals: _Optional[_Union[DecoderTotals, _Mapping]] = ...) -> None: ...

class DecoderTotals(_message.Message):
    __slots__ = ("decode_steps", "decode_tokens", "union_tokens", "step_time_s", "late_transfer_notices", "capture_misses", "refused_transfers", "unchecked_transfers")
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    LATE_TRANSFER_NOTICES_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_MISSES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    UNCHECKED_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    decode_steps: int
    decode_tokens: int
    union_tokens: float
    step_time_s: float
    late_transfer_notices: int
    capture_misses: int
    refused_transfers: int
    unchecked_transfers: int
    def __init__(self, decode_steps: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., union_tokens: _Optional[float] = ..., step_time_s: _Optional[float] = ..., late_transfer_notices: _Optional[int] = ..., capture_misses: _Optional[int] = ..., refused_transfers: _Optional[int] = ..., unchecked_transfers: _Optional[int] = ...) -> None: ...

class DecodeServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeServiceGetInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _worker_pb2.WorkerInfo
    def __init__(self, info: _Optional[_Union[_worker_pb2.WorkerInfo, _Mapping]] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: DecoderState
    def __init__(self, state: _Optional[_Union[DecoderState, _Mapping]] = ...) -> None: ...

class WatchStateRequest(_message.Message):
    __slots__ = ("period_s",)
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    period_s: float
    def __init__(self, period_s: _Optional[float] = ...) -> None: ...

class WatchStateResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: DecoderState
    def __init__(self, state: _Optional[_Union[DecoderState, _Mapping]] = ...) -> None: ...

class GetDecodeCountsRequest(_message.Message):
    __slots__ = ("reservation_id",)
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    def __init__(self, reservation_id: _Optional[str] = ...) -> None: ...

class GetDecodeCountsResponse(_message.Message):
    __slots__ = ("signature",)
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    signature: _signature_pb2.ExpertSignature
    def __init__(self, signature: _Optional[_Union[_signature_pb2.ExpertSignature, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running", "waiting")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...
