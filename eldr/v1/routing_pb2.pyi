from eldr.v1 import signature_pb2 as _signature_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_COMPLETED: _ClassVar[Outcome]
    OUTCOME_CANCELLED: _ClassVar[Outcome]
    OUTCOME_CLIENT_ERROR: _ClassVar[Outcome]
    OUTCOME_BACKPRESSURE: _ClassVar[Outcome]
    OUTCOME_WORKER_ERROR: _ClassVar[Outcome]
    OUTCOME_TIMEOUT: _ClassVar[Outcome]
    OUTCOME_ABANDONED: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_COMPLETED: Outcome
OUTCOME_CANCELLED: Outcome
OUTCOME_CLIENT_ERROR: Outcome
OUTCOME_BACKPRESSURE: Outcome
OUTCOME_WORKER_ERROR: Outcome
OUTCOME_TIMEOUT: Outcome
OUTCOME_ABANDONED: Outcome

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "incarnation", "http_url", "grpc_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    http_url: str
    grpc_address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., http_url: _Optional[str] = ..., grpc_address: _Optional[str] = ...) -> None: ...

class SelectPrefillRequest(_message.Message):
    __slots__ = ("reservation_id", "model", "prompt_prefix", "exclude_worker_ids")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PREFIX_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    model: str
    prompt_prefix: bytes
    exclude_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reservation_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_prefix: _Optional[bytes] = ..., exclude_worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SelectPrefillResponse(_message.Message):
    __slots__ = ("reservation_id", "worker", "expires_in_s")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    worker: WorkerRef
    expires_in_s: float
    def __init__(self, reservation_id: _Optional[str] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class ReleasePrefillRequest(_message.Message):
    __slots__ = ("reservation_id", "outcome")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    outcome: Outcome
    def __init__(self, reservation_id: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ...) -> None: ...

class ReleasePrefillResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class DecodeQuery(_message.Message):
    __slots__ = ("model", "signature", "prompt_tokens", "max_tokens", "domain", "exclude_worker_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    signature: _signature_pb2.ExpertSignature
    prompt_tokens: int
    max_tokens: int
    domain: str
    exclude_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., signature: _Optional[_Union[_signature_pb2.ExpertSignature, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., domain: _Optional[str] = ..., exclude_worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("worker_id", "eligible", "score", "reason", "in_flight")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    eligible: bool
    score: float
    reason: str
    in_flight: int
    def __init__(self, worker_id: _Optional[str] = ..., eligible: _Optional[bool] = ..., score: _Optional[float] = ..., reason: _Optional[str] = ..., in_flight: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("worker", "policy", "reason", "fallback", "candidates")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    policy: str
    reason: str
    fallback: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., policy: _Optional[str] = ..., reason: _Optional[str] = ..., fallback: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class ReserveDecodeRequest(_message.Message):
    __slots__ = ("reservation_id", "query", "prefill_reservation_id", "candidates")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    query: DecodeQuery
    prefill_reservation_id: str
    candidates: bool
    def __init__(self, reservation_id: _Optional[str] = ..., query: _Optional[_Union[DecodeQuery, _Mapping]] = ..., prefill_reservation_id: _Optional[str] = ..., candidates: _Optional[bool] = ...) -> None: ...

class ReserveDecodeResponse(_message.Message):
    __slots__ = ("reservation_id", "decision", "expires_in_s")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    decision: Decision
    expires_in_s: float
    def __init__(self, reservation_id: _Optional[str] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class ReleaseDecodeRequest(_message.Message):
    __slots__ = ("reservation_id", "outcome", "output_tokens", "decoded")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODED_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    outcome: Outcome
    output_tokens: int
    decoded: _signature_pb2.ExpertSignature
    def __init__(self, reservation_id: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., output_tokens: _Optional[int] = ..., decoded: _Optional[_Union[_signature_pb2.ExpertSignature, _Mapping]] = ...) -> None: ...

class ReleaseDecodeResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class ExplainDecodeRequest(_message.Message):
    __slots__ = ("query", "policy")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    query: DecodeQuery
    policy: str
    def __init__(self, query: _Optional[_Union[DecodeQuery, _Mapping]] = ..., policy: _Optional[str] = ...) -> None: ...

class ExplainDecodeResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...

class WatchDecisionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchDecisionsResponse(_message.Message):
    __slots__ = ("reservation_id", "decision", "seconds", "dropped")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    decision: Decision
    seconds: float
    dropped: int
    def __init__(self, reservation_id: _Optional[str] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., seconds: _Optional[float] = ..., dropped: _Optional[int] = ...) -> None: ...

class GetProfileRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetProfileResponse(_message.Message):
    __slots__ = ("loaded", "fingerprint", "transform", "clusters", "layer_mask", "provenance_json")
    LOADED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSFORM_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    LAYER_MASK_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_JSON_FIELD_NUMBER: _ClassVar[int]
    loaded: bool
    fingerprint: str
    transform: str
    clusters: int
    layer_mask: _containers.RepeatedScalarFieldContainer[int]
    provenance_json: str
    def __init__(self, loaded: _Optional[bool] = ..., fingerprint: _Optional[str] = ..., transform: _Optional[str] = ..., clusters: _Optional[int] = ..., layer_mask: _Optional[_Iterable[int]] = ..., provenance_json: _Optional[str] = ...) -> None: ...

class LoadProfileRequest(_message.Message):
    __slots__ = ("profile",)
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    profile: bytes
    def __init__(self, profile: _Optional[bytes] = ...) -> None: ...

class LoadProfileResponse(_message.Message):
    __slots__ = ("fingerprint", "clusters")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    clusters: int
    def __init__(self, fingerprint: _Optional[str] = ..., clusters: _Optional[int] = ...) -> None: ...

class GetDriftRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetDriftResponse(_message.Message):
    __slots__ = ("measured", "reason", "signatures", "age_s", "outside_ratio", "distance_ks", "distance_median", "calibration_distance_median", "occupancy", "occupancy_tv", "refit_pays", "rho")
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_RATIO_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_KS_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_MEDIAN_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_DISTANCE_MEDIAN_FIELD_NUMBER: _ClassVar[int]
    OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    OCCUPANCY_TV_FIELD_NUMBER: _ClassVar[int]
    REFIT_PAYS_FIELD_NUMBER: _ClassVar[int]
    RHO_FIELD_NUMBER: _ClassVar[int]
    measured: bool
    reason: str
    signatures: int
    age_s: float
    outside_ratio: float
    distance_ks: float
    distance_median: float
    calibration_distance_median: float
    occupancy: _containers.RepeatedScalarFieldContainer[float]
    occupancy_tv: float
    refit_pays: bool
    rho: float
    def __init__(self, measured: _Optional[bool] = ..., reason: _Optional[str] = ..., signatures: _Optional[int] = ..., age_s: _Optional[float] = ..., outside_ratio: _Optional[float] = ..., distance_ks: _Optional[float] = ..., distance_median: _Optional[float] = ..., calibration_distance_median: _Optional[float] = ..., occupancy: _Optional[_Iterable[float]] = ..., occupancy_tv: _Optional[float] = ..., refit_pays: _Optional[bool] = ..., rho: _Optional[float] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("policy", "options", "available", "step_times", "decode_shares")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    DECODE_SHARES_FIELD_NUMBER: _ClassVar[int]
    policy: str
    options: _containers.ScalarMap[str, float]
    available: _containers.RepeatedScalarFieldContainer[str]
    step_times: _containers.RepeatedCompositeFieldContainer[StepTimeFit]
    decode_shares: DecodeSharesFit
    def __init__(self, policy: _Optional[str] = ..., options: _Optional[_Mapping[str, float]] = ..., available: _Optional[_Iterable[str]] = ..., step_times: _Optional[_Iterable[_Union[StepTimeFit, _Mapping]]] = ..., decode_shares: _Optional[_Union[DecodeSharesFit, _Mapping]] = ...) -> None: ...

class StepTimeFit(_message.Message):
    __slots__ = ("group", "observations", "outliers", "error")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    OUTLIERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    group: str
    observations: int
    outliers: int
    error: float
    def __init__(self, group: _Optional[str] = ..., observations: _Optional[int] = ..., outliers: _Optional[int] = ..., error: _Optional[float] = ...) -> None: ...

class DecodeSharesFit(_message.Message):
    __slots__ = ("observations", "learned", "error", "plain_error")
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PLAIN_ERROR_FIELD_NUMBER: _ClassVar[int]
    observations: int
    learned: bool
    error: float
    plain_error: float
    def __init__(self, observations: _Optional[int] = ..., learned: _Optional[bool] = ..., error: _Optional[float] = ..., plain_error: _Optional[float] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("policy", "options", "model")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    policy: str
    options: _containers.ScalarMap[str, float]
    model: str
    def __init__(self, policy: _Optional[str] = ..., options: _Optional[_Mapping[str, float]] = ..., model: _Optional[str] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("policy", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    options: _containers.ScalarMap[str, float]
    def __init__(self, policy: _Optional[str] = ..., options: _Optional[_Mapping[str, float]] = ...) -> None: ...
