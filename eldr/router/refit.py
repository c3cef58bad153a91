"""Behind the decisions: one thread that refits the live centroids and measures drift."""

import functools
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from eldr.calibration.drift import Drift, DriftError, drift
from eldr.calibration.live import LiveLocality, Space, unit_vectors
from eldr.calibration.profile import Profile
from eldr.calibration.refit import Centroids, Refit, RefitOutcome, RefitSettings, Refitter
from eldr.router.core import RouterCore
from eldr.router.model import ModelRouting
from eldr.rpc.worker_info import WorkerRole
from eldr.signature.expert_signature import ExpertSignature

log = structlog.get_logger()

DRIFT_WINDOW_S = 60.0
DRIFT_PERIOD_S = 10.0
_DRIFT_GAUGES = (
    "eldr_drift_outside_ratio",
    "eldr_drift_distance_ks",
    "eldr_drift_distance_median",
    "eldr_drift_occupancy_tv",
    "eldr_drift_refit_pays",
)


@dataclass(frozen=True, slots=True)
class DriftStatus:
    """The last measurement and when it was made; `drift` is None where there is none, `reason` then says why."""

    drift: Drift | None
    reason: str = ""
    measured_s: float = 0.0


@dataclass(slots=True)
class _Job:
    """Work on the thread, what to do with its result, and for whom it was begun."""

    future: "Future[object]"
    take: Callable[[object], None]
    live: LiveLocality
    kind: str


class LiveFit:
    """Call `tick` a few times a second on the router's loop; nothing here waits for the thread.

    One thread for all models; see `_ModelFit`.
    """

    def __init__(self, core: RouterCore, executor: Executor | None = None) -> None:
        self._core = core
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="eldr-refit")
        self._fits: dict[ModelRouting, _ModelFit] = {}

    def tick(self, now_s: float) -> None:
        """Takes finished results in and begins what is due."""
        served = self._core.models.all()
        for routing in self._fits.keys() - set(served):
            del self._fits[routing]
        for routing in served:
            self._fit(routing).tick(now_s)

    def drift(self, model: str = "") -> DriftStatus:
        """The last measurement of a model. Raises UnknownModelError, RequestError."""
        return self._fit(self._core.models.find(model)).drift

    def close(self) -> None:
        """Ends the thread after the job that it is at; its result is lost."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _fit(self, routing: ModelRouting) -> "_ModelFit":
        if routing not in self._fits:
            self._fits[routing] = _ModelFit(self._core, routing, self._executor)
        return self._fits[routing]


class _ModelFit:
    """Refits and drift of one model.

    At most one job runs. A refit that is due while one runs is counted as `late` and dropped. A result for a
    profile that has been replaced meanwhile is counted as `superseded` and dropped. Counters:
    `eldr_refits_total{result}` with `refitted`, `window-too-small`, `too-few-distinct`, `failed`, `late` and
    `superseded`, `eldr_refit_dropped_signatures_total`.
    """

    def __init__(self, core: RouterCore, routing: ModelRouting, executor: Executor) -> None:
        self._core = core
        self._routing = routing
        self._executor = executor
        self._job: _Job | None = None
        self._refit_due_s = 0.0
        self._drift_due_s = 0.0
        self._profile: Profile | None = None
        self.drift = DriftStatus(None, "no profile is loaded")

    def tick(self, now_s: float) -> None:
        """Takes a finished result in and begins what is due."""
        self._collect()
        if self._routing.refits and now_s >= self._refit_due_s:
            self._refit_due_s = now_s + self._routing.policy[1]["interval_s"]
            self._begin_refit(now_s)
        profile = self._routing.profile
        if profile is not self._profile:
            self._profile = profile
            self._drift_due_s = now_s
            self.drift = DriftStatus(None, "not measured yet")
        if profile is not None and now_s >= self._drift_due_s and self._job is None:
            self._drift_due_s = now_s + DRIFT_PERIOD_S
            self._begin_drift(profile, now_s)

    def _begin_refit(self, now_s: float) -> None:
        core = self._core
        if self._job is not None:
            if self._job.kind == "refit":
                core.counters.add("eldr_refits_total", result="late")
            else:  # a measurement is short: try again at the next tick
                self._refit_due_s = now_s
            return
        decoders = [
            member.info.worker_id
            for member in core.fleet.members(WorkerRole.DECODE, self._routing.name)
            if not core.fleet.ineligible(member, now_s)
        ]
        options = self._routing.policy[1]
        signatures = self._routing.window.since(now_s - options["window_s"])
        rows_needed = int(options["rows_per_decoder"]) * max(1, len(decoders))
        if not decoders or len(signatures) < rows_needed:
            core.counters.add("eldr_refits_total", result=RefitOutcome.WINDOW_TOO_SMALL.value)
            return
        refitter = Refitter(
            RefitSettings(rows_per_decoder=int(options["rows_per_decoder"]), seed=core.settings.seed)
        )
        work = functools.partial(
            _refit, refitter, self._routing.live.space, self._routing.live.centroids, signatures, decoders
        )
        self._job = _Job(self._executor.submit(work), self._take_refit, self._routing.live, "refit")

    def _begin_drift(self, profile: Profile, now_s: float) -> None:
        signatures = self._routing.window.since(now_s - DRIFT_WINDOW_S)
        work = functools.partial(_drift, profile, signatures, now_s)
        self._job = _Job(self._executor.submit(work), self._take_drift, self._routing.live, "drift")

    def _collect(self) -> None:
        job = self._job
        if job is None or not job.future.done():
            return
        self._job = None
        error = job.future.exception()
        if error is not None:
            log.error("live_fit_failed", kind=job.kind, exc_info=error)
            if job.kind == "refit":
                self._core.counters.add("eldr_refits_total", result=RefitOutcome.FAILED.value)
            else:
                self.drift = DriftStatus(None, f"the measurement failed: {error}")
        elif job.live is not self._routing.live:
            if job.kind == "refit":
                self._core.counters.add("eldr_refits_total", result="superseded")
        else:
            job.take(job.future.result())

    def _take_refit(self, result: object) -> None:
        assert isinstance(result, Refit)
        self._core.counters.add("eldr_refits_total", result=result.outcome.value)
        self._core.counters.add("eldr_refit_dropped_signatures_total", result.dropped)
        if result.outcome is RefitOutcome.REFITTED:
            self._routing.live.centroids = result.centroids
            self._core.gauges.set("eldr_refit_signatures", result.rows, model=self._routing.name)
            self._core.gauges.set("eldr_refit_shift", result.shift, model=self._routing.name)
        elif result.outcome is RefitOutcome.FAILED:
            log.warning("refit_failed", why=result.detail)

    def _take_drift(self, result: object) -> None:
        assert isinstance(result, DriftStatus)
        self.drift = result
        gauges, model = self._core.gauges, self._routing.name
        gauges.clear("eldr_drift_occupancy_ratio", model=model)
        found = result.drift
        if found is None:
            for name in _DRIFT_GAUGES:
                gauges.clear(name, model=model)
            return
        values = (
            found.outside,
            found.distance_ks,
            found.distance_median,
            found.occupancy_tv,
            float(found.refit_pays),
        )
        for name, value in zip(_DRIFT_GAUGES, values, strict=True):
            gauges.set(name, value, model=model)
        for cluster, share in enumerate(found.occupancy):
            gauges.set("eldr_drift_occupancy_ratio", share, cluster=str(cluster), model=model)


def _refit(
    refitter: Refitter,
    space: Space,
    centroids: Centroids | None,
    signatures: tuple[ExpertSignature, ...],
    decoders: list[str],
) -> Refit:
    rows = unit_vectors(space, signatures)
    result = refitter.refit(rows, centroids, decoders)
    unplaced = len(signatures) - len(rows)
    return Refit(
        result.outcome, result.centroids, result.rows, result.dropped + unplaced, result.shift, result.detail
    )


def _drift(profile: Profile, signatures: tuple[ExpertSignature, ...], now_s: float) -> DriftStatus:
    try:
        found = drift(unit_vectors(profile, signatures), profile.centroids, profile.clustering)
    except DriftError as error:
        return DriftStatus(None, str(error), now_s)
    return DriftStatus(found, "", now_s)
