from eldr.v1 import signature_pb2 as _signature_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "http_url", "grpc_address", "geometry", "served_model", "block_size", "engine_version", "max_model_len", "max_num_seqs", "kv_layout", "hit_window_steps")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HIT_WINDOW_STEPS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: WorkerRole
    http_url: str
    grpc_address: str
    geometry: _signature_pb2.ModelGeometry
    served_model: str
    block_size: int
    engine_version: str
    max_model_len: int
    max_num_seqs: int
    kv_layout: str
    hit_window_steps: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., http_url: _Optional[str] = ..., grpc_address: _Optional[str] = ..., geometry: _Optional[_Union[_signature_pb2.ModelGeometry, _Mapping]] = ..., served_model: _Optional[str] = ..., block_size: _Optional[int] = ..., engine_version: _Optional[str] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., kv_layout: _Optional[str] = ..., hit_window_steps: _Optional[int] = ...) -> None: ...
