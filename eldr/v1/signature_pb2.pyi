from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CountWidth(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COUNT_WIDTH_UNSPECIFIED: _ClassVar[CountWidth]
    COUNT_WIDTH_U8: _ClassVar[CountWidth]
    COUNT_WIDTH_U16: _ClassVar[CountWidth]
    COUNT_WIDTH_U32: _ClassVar[CountWidth]

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPRESSION_UNSPECIFIED: _ClassVar[Compression]
    COMPRESSION_NONE: _ClassVar[Compression]
    COMPRESSION_ZLIB: _ClassVar[Compression]
COUNT_WIDTH_UNSPECIFIED: CountWidth
COUNT_WIDTH_U8: CountWidth
COUNT_WIDTH_U16: CountWidth
COUNT_WIDTH_U32: CountWidth
COMPRESSION_UNSPECIFIED: Compression
COMPRESSION_NONE: Compression
COMPRESSION_ZLIB: Compression

class ModelGeometry(_message.Message):
    __slots__ = ("moe_layers", "experts", "top_k", "fingerprint")
    MOE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    moe_layers: _containers.RepeatedScalarFieldContainer[int]
    experts: int
    top_k: int
    fingerprint: str
    def __init__(self, moe_layers: _Optional[_Iterable[int]] = ..., experts: _Optional[int] = ..., top_k: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class ExpertSignature(_message.Message):
    __slots__ = ("schema_version", "fingerprint", "layers", "experts", "top_k", "tokens", "covered_tokens", "width", "compression", "counts")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    fingerprint: str
    layers: int
    experts: int
    top_k: int
    tokens: int
    covered_tokens: int
    width: CountWidth
    compression: Compression
    counts: bytes
    def __init__(self, schema_version: _Optional[int] = ..., fingerprint: _Optional[str] = ..., layers: _Optional[int] = ..., experts: _Optional[int] = ..., top_k: _Optional[int] = ..., tokens: _Optional[int] = ..., covered_tokens: _Optional[int] = ..., width: _Optional[_Union[CountWidth, str]] = ..., compression: _Optional[_Union[Compression, str]] = ..., counts: _Optional[bytes] = ...) -> None: ...
