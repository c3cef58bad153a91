"""The gRPC services of the router: messages in, the core, messages out."""

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from eldr.calibration.profile import Profile
from eldr.router.core import RouterCore
from eldr.router.errors import RequestError
from eldr.router.refit import LiveFit
from eldr.router.refusals import answers
from eldr.router.registrations import RegistrationRate
from eldr.router.signatures import read_decoded, read_signature
from eldr.routing.contract import DecodeRequest
from eldr.routing.predictor import PLAIN
from eldr.rpc.codec import decode_query, decode_worker_info, encode_decision
from eldr.rpc.fleet_codec import decode_outcome, encode_worker_ref, encode_worker_status
from eldr.rpc.worker_info import WorkerRole
from eldr.v1 import fleet_pb2, fleet_pb2_grpc, routing_pb2, routing_pb2_grpc

MAX_ID_CHARACTERS = 256

Context = grpc.aio.ServicerContext[Any, Any]


class RouterServicer(routing_pb2_grpc.RouterServiceServicer):  # type: ignore[misc]
    """`eldr.v1.RouterService`."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    @answers
    def SelectPrefill(  # noqa: N802
        self, request: routing_pb2.SelectPrefillRequest
    ) -> routing_pb2.SelectPrefillResponse:
        booked = self._core.select_prefill(
            request.prompt_prefix,
            request.model,
            _booking_id(request.reservation_id),
            frozenset(request.exclude_worker_ids),
        )
        return routing_pb2.SelectPrefillResponse(
            reservation_id=booked.reservation_id,
            worker=encode_worker_ref(booked.worker),
            expires_in_s=booked.expires_in_s,
        )

    @answers
    def ReleasePrefill(  # noqa: N802
        self, request: routing_pb2.ReleasePrefillRequest
    ) -> routing_pb2.ReleasePrefillResponse:
        released = self._core.release(
            WorkerRole.PREFILL, _known_id(request.reservation_id), decode_outcome(request.outcome)
        )
        return routing_pb2.ReleasePrefillResponse(released=released)

    @answers
    def ReserveDecode(  # noqa: N802
        self, request: routing_pb2.ReserveDecodeRequest
    ) -> routing_pb2.ReserveDecodeResponse:
        booked = self._core.reserve_decode(
            self._request(_booking_id(request.reservation_id), request.query),
            request.query.model,
            request.prefill_reservation_id,
        )
        assert booked.decision is not None
        asyncio.get_running_loop().call_soon(self._core.prepare, booked.worker.served_model)
        return routing_pb2.ReserveDecodeResponse(
            reservation_id=booked.reservation_id,
            decision=encode_decision(booked.decision, encode_worker_ref(booked.worker), request.candidates),
            expires_in_s=booked.expires_in_s,
        )

    @answers
    def ReleaseDecode(  # noqa: N802
        self, request: routing_pb2.ReleaseDecodeRequest
    ) -> routing_pb2.ReleaseDecodeResponse:
        released = self._core.release(
            WorkerRole.DECODE,
            _known_id(request.reservation_id),
            decode_outcome(request.outcome),
            request.output_tokens,
            read_decoded(request, self._core.booked_geometry(request.reservation_id)),
        )
        return routing_pb2.ReleaseDecodeResponse(released=released)

    @answers
    def ExplainDecode(  # noqa: N802
        self, request: routing_pb2.ExplainDecodeRequest
    ) -> routing_pb2.ExplainDecodeResponse:
        decision, info = self._core.explain_decode(
            self._request("", request.query), request.query.model, request.policy
        )
        worker = encode_worker_ref(info) if info else None
        return routing_pb2.ExplainDecodeResponse(decision=encode_decision(decision, worker))

    async def WatchDecisions(  # noqa: N802
        self, request: routing_pb2.WatchDecisionsRequest, context: Context
    ) -> AsyncIterator[routing_pb2.WatchDecisionsResponse]:
        with self._core.decisions.subscribe() as events:
            async for made, dropped in events:
                yield routing_pb2.WatchDecisionsResponse(
                    reservation_id=made.reservation_id,
                    decision=encode_decision(made.decision, encode_worker_ref(made.worker)),
                    seconds=made.seconds,
                    dropped=dropped,
                )

    def _request(self, reservation_id: str, query: routing_pb2.DecodeQuery) -> DecodeRequest:
        geometry = self._core.models.find(query.model).geometry
        read = read_signature(query, geometry, self._core.settings.min_coverage)
        return decode_query(reservation_id, query, read.signature, read.problem)


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):  # type: ignore[misc]
    """`eldr.v1.FleetService`."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._rate = RegistrationRate(core.settings.registrations_per_s, core.now_s)

    async def RegisterWorker(  # noqa: N802
        self, request: fleet_pb2.RegisterWorkerRequest, context: Context
    ) -> fleet_pb2.RegisterWorkerResponse:
        if not self._rate.allows(context.peer()):
            self._core.counters.add("eldr_registrations_over_rate_total")
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"more than {self._core.settings.registrations_per_s:g} registrations a second from one host",
            )
        answer: fleet_pb2.RegisterWorkerResponse = await self._register(request, context)
        return answer

    @answers
    def _register(self, request: fleet_pb2.RegisterWorkerRequest) -> fleet_pb2.RegisterWorkerResponse:
        changed = self._core.register(decode_worker_info(request.info))
        return fleet_pb2.RegisterWorkerResponse(changed=changed)

    @answers
    def ListWorkers(  # noqa: N802
        self, request: fleet_pb2.ListWorkersRequest
    ) -> fleet_pb2.ListWorkersResponse:
        return fleet_pb2.ListWorkersResponse(workers=map(encode_worker_status, self._core.workers()))

    @answers
    def DrainWorker(  # noqa: N802
        self, request: fleet_pb2.DrainWorkerRequest
    ) -> fleet_pb2.DrainWorkerResponse:
        limit_s = request.limit_s if request.HasField("limit_s") else self._core.settings.drain_limit_s
        if not 0 <= limit_s < math.inf:
            raise RequestError(f"limit_s must be finite and not negative, got {limit_s:g}")
        return fleet_pb2.DrainWorkerResponse(bookings=self._core.drain(request.worker_id, limit_s))

    @answers
    def RemoveWorker(  # noqa: N802
        self, request: fleet_pb2.RemoveWorkerRequest
    ) -> fleet_pb2.RemoveWorkerResponse:
        return fleet_pb2.RemoveWorkerResponse(removed=self._core.remove(request.worker_id))

    async def WatchFleet(  # noqa: N802
        self, request: fleet_pb2.WatchFleetRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.WatchFleetResponse]:
        # Subscribed before the first snapshot, so that no change falls between the two.
        with self._core.changes.subscribe() as changes:
            yield self._snapshot()
            async for _ in changes:
                yield self._snapshot()

    def _snapshot(self) -> fleet_pb2.WatchFleetResponse:
        return fleet_pb2.WatchFleetResponse(
            generation=self._core.fleet.generation, workers=map(encode_worker_status, self._core.workers())
        )


class ProfileServicer(routing_pb2_grpc.ProfileServiceServicer):  # type: ignore[misc]
    """`eldr.v1.ProfileService`."""

    def __init__(self, core: RouterCore, live_fit: LiveFit) -> None:
        self._core = core
        self._live_fit = live_fit

    @answers
    def GetProfile(self, request: routing_pb2.GetProfileRequest) -> routing_pb2.GetProfileResponse:  # noqa: N802
        profile = self._core.models.find(request.model).profile
        if profile is None:
            return routing_pb2.GetProfileResponse(loaded=False)
        return routing_pb2.GetProfileResponse(
            loaded=True,
            fingerprint=profile.fingerprint,
            transform=profile.transform,
            clusters=profile.clusters,
            layer_mask=profile.layer_mask,
            provenance_json=json.dumps(dataclasses.asdict(profile.provenance)),
        )

    @answers
    def LoadProfile(self, request: routing_pb2.LoadProfileRequest) -> routing_pb2.LoadProfileResponse:  # noqa: N802
        profile = Profile.from_bytes(request.profile)
        self._core.models.load_profile(profile)
        return routing_pb2.LoadProfileResponse(fingerprint=profile.fingerprint, clusters=profile.clusters)

    @answers
    def GetDrift(self, request: routing_pb2.GetDriftRequest) -> routing_pb2.GetDriftResponse:  # noqa: N802
        status = self._live_fit.drift(request.model)
        found = status.drift
        if found is None:
            return routing_pb2.GetDriftResponse(measured=False, reason=status.reason)
        return routing_pb2.GetDriftResponse(
            measured=True,
            reason=found.advice,
            signatures=found.rows,
            age_s=self._core.now_s() - status.measured_s,
            outside_ratio=found.outside,
            distance_ks=found.distance_ks,
            distance_median=found.distance_median,
            calibration_distance_median=found.calibration_median,
            occupancy=found.occupancy,
            occupancy_tv=found.occupancy_tv,
            refit_pays=found.refit_pays,
            rho=found.rho,
        )

    @answers
    def GetPolicy(self, request: routing_pb2.GetPolicyRequest) -> routing_pb2.GetPolicyResponse:  # noqa: N802
        routing = self._core.models.find(request.model)
        name, options = routing.policy
        predictor = routing.predictor
        return routing_pb2.GetPolicyResponse(
            policy=name,
            options=options,
            available=routing.available_policies,
            step_times=[
                routing_pb2.StepTimeFit(
                    group=group, observations=fit.observations, outliers=fit.outliers, error=fit.error
                )
                for group, fit in routing.step_times.items()
            ],
            decode_shares=routing_pb2.DecodeSharesFit(
                observations=predictor.observations,
                learned=predictor.form is not PLAIN,
                error=predictor.error,
                plain_error=predictor.errors[PLAIN],
            ),
        )

    @answers
    def SetPolicy(self, request: routing_pb2.SetPolicyRequest) -> routing_pb2.SetPolicyResponse:  # noqa: N802
        models = self._core.models
        models.set_policy(request.policy, dict(request.options), request.model)
        name, options = (models.find(request.model) if request.model else models.all()[0]).policy
        return routing_pb2.SetPolicyResponse(policy=name, options=options)


def _booking_id(text: str) -> str:
    if len(text) > MAX_ID_CHARACTERS:
        raise RequestError(
            f"reservation_id must have at most {MAX_ID_CHARACTERS} characters, got {len(text)}"
        )
    return text


def _known_id(text: str) -> str:
    if not text:
        raise RequestError("reservation_id must not be empty")
    return _booking_id(text)
