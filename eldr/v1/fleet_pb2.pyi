from eldr.v1 import decode_pb2 as _decode_pb2
from eldr.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerHealth(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_HEALTH_UNSPECIFIED: _ClassVar[WorkerHealth]
    WORKER_HEALTH_STARTING: _ClassVar[WorkerHealth]
    WORKER_HEALTH_LIVE: _ClassVar[WorkerHealth]
    WORKER_HEALTH_SUSPECT: _ClassVar[WorkerHealth]
    WORKER_HEALTH_DEAD: _ClassVar[WorkerHealth]
    WORKER_HEALTH_DRAINING: _ClassVar[WorkerHealth]
WORKER_HEALTH_UNSPECIFIED: WorkerHealth
WORKER_HEALTH_STARTING: WorkerHealth
WORKER_HEALTH_LIVE: WorkerHealth
WORKER_HEALTH_SUSPECT: WorkerHealth
WORKER_HEALTH_DEAD: WorkerHealth
WORKER_HEALTH_DRAINING: WorkerHealth

class Worker(_message.Message):
    __slots__ = ("info", "health", "bookings", "state_age_s", "state", "reason")
    INFO_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    BOOKINGS_FIELD_NUMBER: _ClassVar[int]
    STATE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    info: _worker_pb2.WorkerInfo
    health: WorkerHealth
    bookings: int
    state_age_s: float
    state: _decode_pb2.DecoderState
    reason: str
    def __init__(self, info: _Optional[_Union[_worker_pb2.WorkerInfo, _Mapping]] = ..., health: _Optional[_Union[WorkerHealth, str]] = ..., bookings: _Optional[int] = ..., state_age_s: _Optional[float] = ..., state: _Optional[_Union[_decode_pb2.DecoderState, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _worker_pb2.WorkerInfo
    def __init__(self, info: _Optional[_Union[_worker_pb2.WorkerInfo, _Mapping]] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    def __init__(self, changed: _Optional[bool] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "limit_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    limit_s: float
    def __init__(self, worker_id: _Optional[str] = ..., limit_s: _Optional[float] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("bookings",)
    BOOKINGS_FIELD_NUMBER: _ClassVar[int]
    bookings: int
    def __init__(self, bookings: _Optional[int] = ...) -> None: ...

class RemoveWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class RemoveWorkerResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    def __init__(self, removed: _Optional[bool] = ...) -> None: ...

class WatchFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchFleetResponse(_message.Message):
    __slots__ = ("generation", "workers")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, generation: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...
