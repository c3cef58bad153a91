from eldr.v1 import signature_pb2 as _signature_pb2
from eldr.v1 import worker_pb2 as _worker_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillServiceGetInfoResponse(_message.Message):
    __slots__ = ("info", "held_transfers", "kv_usage")
    INFO_FIELD_NUMBER: _ClassVar[int]
    HELD_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    info: _worker_pb2.WorkerInfo
    held_transfers: int
    kv_usage: float
    def __init__(self, info: _Optional[_Union[_worker_pb2.WorkerInfo, _Mapping]] = ..., held_transfers: _Optional[int] = ..., kv_usage: _Optional[float] = ...) -> None: ...

class GetSignatureRequest(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    def __init__(self, transfer_id: _Optional[str] = ...) -> None: ...

class GetSignatureResponse(_message.Message):
    __slots__ = ("signature",)
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    signature: _signature_pb2.ExpertSignature
    def __init__(self, signature: _Optional[_Union[_signature_pb2.ExpertSignature, _Mapping]] = ...) -> None: ...

class WatchSignaturesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchSignaturesResponse(_message.Message):
    __slots__ = ("transfer_id", "signature", "dropped")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    signature: _signature_pb2.ExpertSignature
    dropped: int
    def __init__(self, transfer_id: _Optional[str] = ..., signature: _Optional[_Union[_signature_pb2.ExpertSignature, _Mapping]] = ..., dropped: _Optional[int] = ...) -> None: ...

class ReleaseTransferRequest(_message.Message):
    __slots__ = ("transfer_id", "incarnation")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    incarnation: str
    def __init__(self, transfer_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class ReleaseTransferResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class ConfirmTransferRequest(_message.Message):
    __slots__ = ("transfer_id", "incarnation", "reader_id")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    incarnation: str
    reader_id: str
    def __init__(self, transfer_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., reader_id: _Optional[str] = ...) -> None: ...

class ConfirmTransferResponse(_message.Message):
    __slots__ = ("intact",)
    INTACT_FIELD_NUMBER: _ClassVar[int]
    intact: bool
    def __init__(self, intact: _Optional[bool] = ...) -> None: ...
