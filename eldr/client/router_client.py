"""Typed asynchronous client of the router.

    async with RouterClient("127.0.0.1:7700") as router:
        prefill = await router.select_prefill(prompt_prefix=b"def quicksort(")
        ...  # the prefill leg at prefill.worker.http_url answers with kv_transfer_params
        booking = await router.reserve_decode(
            signature=kv_transfer_params["eldr_signature"],
            prefill_reservation_id=prefill.reservation_id,
        )
        ...  # the decode leg at booking.worker.http_url
        await router.release_decode(booking.reservation_id, Outcome.COMPLETED)

Every call has a deadline, and raises RouterError (see `eldr.client.errors`) where it fails.
"""

import json
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Self

from eldr.client.failover import Failover
from eldr.client.results import (
    DecisionEvent,
    DecodeReservation,
    DecodeSharesFit,
    DriftStatus,
    FleetSnapshot,
    PolicyStatus,
    PrefillReservation,
    ProfileStatus,
    StepTimeFit,
)
from eldr.routing.contract import Decision
from eldr.rpc.calling import Caller
from eldr.rpc.codec import decode_decision, encode_signature, encode_worker_info, signature_message_from_text
from eldr.rpc.fleet_codec import decode_worker_ref, decode_worker_status, encode_outcome
from eldr.rpc.outcome import Outcome
from eldr.rpc.settings import UNARY_TIMEOUT_S
from eldr.rpc.worker_info import WorkerInfo
from eldr.rpc.worker_status import WorkerStatus
from eldr.signature.expert_signature import ExpertSignature
from eldr.v1 import fleet_pb2, routing_pb2, signature_pb2
from eldr.v1.fleet_pb2_grpc import FleetServiceStub
from eldr.v1.routing_pb2_grpc import ProfileServiceStub, RouterServiceStub


class RouterClient:
    """Calls the first router of `addresses` (host:port) that answers and knows a worker, and stays with it.

    `timeout_s` is the deadline of every unary call, over all addresses together. Channels open at the first
    call, on the running loop. `caller` says whether over TLS and with which token.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        timeout_s: float = UNARY_TIMEOUT_S,
        caller: Caller | None = None,
    ) -> None:
        several = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        self._routers = Failover(several, timeout_s, caller or Caller())
        self._call, self._stream = self._routers.call, self._routers.stream

    @property
    def addresses(self) -> tuple[str, ...]:
        """As they were given."""
        return self._routers.addresses

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes every channel; calls in flight are cancelled."""
        await self._routers.close()

    # Bookings.

    async def select_prefill(
        self,
        *,
        model: str = "",
        prompt_prefix: bytes = b"",
        reservation_id: str = "",
        exclude: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> PrefillReservation:
        """Picks and books a prefill worker by the first 1,024 bytes of the prompt.

        A replay with the same `reservation_id` gives the same answer; one is made up when it is empty.
        `timeout_s` is a shorter deadline than the client's own. Raises NoWorkerError where no prefill worker can
        take the request.
        """
        request = routing_pb2.SelectPrefillRequest(
            reservation_id=reservation_id or uuid.uuid4().hex,
            model=model,
            prompt_prefix=prompt_prefix[:1024],
            exclude_worker_ids=exclude,
        )
        answer = await self._call(RouterServiceStub, "SelectPrefill", request, timeout_s)
        return PrefillReservation(
            answer.reservation_id, decode_worker_ref(answer.worker), answer.expires_in_s
        )

    async def release_prefill(self, reservation_id: str, outcome: Outcome) -> bool:
        """Ends a prefill booking. False when it was unknown or already released."""
        request = routing_pb2.ReleasePrefillRequest(
            reservation_id=reservation_id, outcome=encode_outcome(outcome)
        )
        answer = await self._call(RouterServiceStub, "ReleasePrefill", request)
        return bool(answer.released)

    async def reserve_decode(
        self,
        *,
        model: str = "",
        signature: ExpertSignature | str | None = None,
        prompt_tokens: int = 0,
        max_tokens: int = 0,
        domain: str = "",
        exclude: Sequence[str] = (),
        reservation_id: str = "",
        prefill_reservation_id: str = "",
        timeout_s: float | None = None,
        candidates: bool = False,
    ) -> DecodeReservation:
        """Picks and books a decode worker in one step.

        `signature` may be the text of `kv_transfer_params["eldr_signature"]`, which is passed on without
        unpacking; text that is no signature message raises CodecError. A signature that the router cannot
        use is a fallback there (`decision.fallback`), not an error. A replay with the same `reservation_id`
        gives the same answer; one is made up when it is empty. `timeout_s` is a shorter deadline than the
        client's own. Raises NoWorkerError where no decode worker can take the request.
        """
        request = routing_pb2.ReserveDecodeRequest(
            reservation_id=reservation_id or uuid.uuid4().hex,
            query=_query(model, signature, prompt_tokens, max_tokens, domain, exclude),
            prefill_reservation_id=prefill_reservation_id,
            candidates=candidates,
        )
        answer = await self._call(RouterServiceStub, "ReserveDecode", request, timeout_s)
        return DecodeReservation(
            answer.reservation_id,
            decode_worker_ref(answer.decision.worker),
            decode_decision(answer.decision),
            answer.expires_in_s,
        )

    async def release_decode(
        self,
        reservation_id: str,
        outcome: Outcome,
        output_tokens: int = 0,
        decoded: ExpertSignature | None = None,
    ) -> bool:
        """Ends a decode booking. False when it was unknown or already released.

        The router's predictor of decode shares learns from `decoded`, see `WorkerClient.get_decode_counts`.
        """
        request = routing_pb2.ReleaseDecodeRequest(
            reservation_id=reservation_id,
            outcome=encode_outcome(outcome),
            output_tokens=output_tokens,
            decoded=None if decoded is None else encode_signature(decoded),
        )
        answer = await self._call(RouterServiceStub, "ReleaseDecode", request)
        return bool(answer.released)

    async def explain_decode(
        self,
        *,
        model: str = "",
        signature: ExpertSignature | str | None = None,
        prompt_tokens: int = 0,
        max_tokens: int = 0,
        domain: str = "",
        exclude: Sequence[str] = (),
        policy: str = "",
    ) -> Decision:
        """A dry run of `reserve_decode`: every decoder with its score, eligibility and reason. Books nothing.

        `policy` asks another policy than the one in force. Where no decoder is eligible, `worker_id` is
        empty and the candidates say why.
        """
        request = routing_pb2.ExplainDecodeRequest(
            query=_query(model, signature, prompt_tokens, max_tokens, domain, exclude), policy=policy
        )
        answer = await self._call(RouterServiceStub, "ExplainDecode", request)
        return decode_decision(answer.decision)

    async def watch_decisions(self) -> AsyncGenerator[DecisionEvent, None]:
        """Decisions of one router as they are made, from now on. A slow reader loses the oldest."""
        request = routing_pb2.WatchDecisionsRequest()
        async for event in self._stream(RouterServiceStub, "WatchDecisions", request):
            yield DecisionEvent(
                event.reservation_id, decode_decision(event.decision), event.seconds, event.dropped
            )

    # Fleet.

    async def workers(self) -> list[WorkerStatus]:
        """Every worker, sorted by worker id."""
        answer = await self._call(FleetServiceStub, "ListWorkers", fleet_pb2.ListWorkersRequest())
        return [decode_worker_status(worker) for worker in answer.workers]

    async def register(self, info: WorkerInfo) -> bool:
        """Adds a worker or replaces its entry. True when it is new or its incarnation changed.

        Raises RouterError with FAILED_PRECONDITION where it does not fit the fleet, naming both values.
        """
        request = fleet_pb2.RegisterWorkerRequest(info=encode_worker_info(info))
        answer = await self._call(FleetServiceStub, "RegisterWorker", request)
        return bool(answer.changed)

    async def drain(self, worker_id: str, limit_s: float | None = None) -> int:
        """Gives a worker no new work from now on. Returns the bookings that it still has.

        It leaves the fleet once it has nothing left to do, or after `limit_s` (None: the router's setting).
        """
        request = fleet_pb2.DrainWorkerRequest(worker_id=worker_id, limit_s=limit_s)
        answer = await self._call(FleetServiceStub, "DrainWorker", request)
        return int(answer.bookings)

    async def remove(self, worker_id: str) -> bool:
        """Forgets a worker. False when it was unknown."""
        request = fleet_pb2.RemoveWorkerRequest(worker_id=worker_id)
        answer = await self._call(FleetServiceStub, "RemoveWorker", request)
        return bool(answer.removed)

    async def watch_fleet(self) -> AsyncGenerator[FleetSnapshot, None]:
        """The whole fleet at once, then again after every change."""
        request = fleet_pb2.WatchFleetRequest()
        async for event in self._stream(FleetServiceStub, "WatchFleet", request):
            yield FleetSnapshot(event.generation, tuple(map(decode_worker_status, event.workers)))

    # Policy and profile.

    # A model may be left out where the router serves one.

    async def get_policy(self, model: str = "") -> PolicyStatus:
        """The policy in force, and how well its models fit."""
        answer = await self._call(ProfileServiceStub, "GetPolicy", routing_pb2.GetPolicyRequest(model=model))
        shares = answer.decode_shares
        return PolicyStatus(
            answer.policy,
            dict(answer.options),
            tuple(answer.available),
            tuple(
                StepTimeFit(fit.group, fit.observations, fit.outliers, fit.error) for fit in answer.step_times
            ),
            DecodeSharesFit(shares.observations, shares.learned, shares.error, shares.plain_error),
        )

    async def set_policy(
        self, name: str, options: Mapping[str, float] | None = None, model: str = ""
    ) -> PolicyStatus:
        """Switches the policy; options left out take their defaults. `available` is empty in the answer.

        Without a model that of all, and of those to come. Raises RouterError with INVALID_ARGUMENT on an
        unknown name or option.
        """
        request = routing_pb2.SetPolicyRequest(policy=name, options=dict(options or {}), model=model)
        answer = await self._call(ProfileServiceStub, "SetPolicy", request)
        return PolicyStatus(answer.policy, dict(answer.options))

    async def get_profile(self, model: str = "") -> ProfileStatus:
        """The fitted profile in force."""
        request = routing_pb2.GetProfileRequest(model=model)
        answer = await self._call(ProfileServiceStub, "GetProfile", request)
        if not answer.loaded:
            return ProfileStatus(loaded=False)
        return ProfileStatus(
            loaded=True,
            fingerprint=answer.fingerprint,
            transform=answer.transform,
            clusters=answer.clusters,
            layer_mask=tuple(answer.layer_mask),
            provenance=json.loads(answer.provenance_json or "{}"),
        )

    async def load_profile(self, data: bytes) -> ProfileStatus:
        """Replaces the profile of the models of its fingerprint by the bytes of a profile file.

        Only `fingerprint` and `clusters` are filled in. Raises RouterError with INVALID_ARGUMENT where the
        bytes are no profile, FAILED_PRECONDITION where it is of another model than the fleet's.
        """
        request = routing_pb2.LoadProfileRequest(profile=data)
        answer = await self._call(ProfileServiceStub, "LoadProfile", request)
        return ProfileStatus(loaded=True, fingerprint=answer.fingerprint, clusters=answer.clusters)

    async def get_drift(self, model: str = "") -> DriftStatus:
        """How far live traffic is from the profile's calibration, as last measured."""
        answer = await self._call(ProfileServiceStub, "GetDrift", routing_pb2.GetDriftRequest(model=model))
        return DriftStatus(
            measured=answer.measured,
            reason=answer.reason,
            signatures=answer.signatures,
            age_s=answer.age_s,
            outside_ratio=answer.outside_ratio,
            distance_ks=answer.distance_ks,
            distance_median=answer.distance_median,
            calibration_distance_median=answer.calibration_distance_median,
            occupancy=tuple(answer.occupancy),
            occupancy_tv=answer.occupancy_tv,
            refit_pays=answer.refit_pays,
            rho=answer.rho if answer.HasField("rho") else None,
        )


def _query(
    model: str,
    signature: ExpertSignature | str | None,
    prompt_tokens: int,
    max_tokens: int,
    domain: str,
    exclude: Sequence[str],
) -> routing_pb2.DecodeQuery:
    message: signature_pb2.ExpertSignature | None = None
    if isinstance(signature, ExpertSignature):
        message = encode_signature(signature)
    elif signature is not None:
        message = signature_message_from_text(signature)
    return routing_pb2.DecodeQuery(
        model=model,
        signature=message,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        domain=domain,
        exclude_worker_ids=exclude,
    )
