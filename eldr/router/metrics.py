"""What the router exports: its counters and gauges, and the fleet as it stands (docs/metrics.md)."""

from collections import Counter
from collections.abc import Iterator

from eldr.observability.series import Catalogue, Kind, Sample, Series
from eldr.router.core import RouterCore
from eldr.rpc.worker_info import WorkerRole
from eldr.rpc.worker_status import WorkerHealth, WorkerStatus

_COUNTER, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

ROUTER = Catalogue(
    # Decisions.
    Series("eldr_decisions_total", _COUNTER, "Decode decisions that were booked.", ("policy",)),
    Series("eldr_decision_seconds", _HISTOGRAM, "Time of one decode decision, its booking included."),
    Series(
        "eldr_fallbacks_total",
        _COUNTER,
        "Decisions that a policy made in another way than its own, by reason.",
        ("policy", "fallback"),
    ),
    Series("eldr_no_worker_total", _COUNTER, "Requests for which no worker was eligible.", ("role",)),
    Series(
        "eldr_signatures_total", _COUNTER, "Signatures of decode requests, by what they were.", ("result",)
    ),
    # Bookings.
    Series("eldr_reservations_total", _COUNTER, "Bookings made.", ("role",)),
    Series("eldr_replays_total", _COUNTER, "Requests answered again with the booking that they had."),
    Series("eldr_releases_total", _COUNTER, "Bookings ended by their holder.", ("role", "outcome")),
    Series("eldr_releases_unknown_total", _COUNTER, "Releases of bookings that do not exist.", ("role",)),
    Series("eldr_reservations_expired_total", _COUNTER, "Bookings that nobody ended in time.", ("role",)),
    Series("eldr_reservations_dropped_total", _COUNTER, "Bookings that ended with their worker's process."),
    Series("eldr_output_tokens_total", _COUNTER, "Output tokens told with releases."),
    Series("eldr_bookings", _GAUGE, "Bookings now.", ("worker_id", "role")),
    # Fleet.
    Series("eldr_workers", _GAUGE, "Workers now.", ("role", "health")),
    Series("eldr_registrations_total", _COUNTER, "Workers that joined or changed.", ("role",)),
    Series(
        "eldr_registrations_over_rate_total", _COUNTER, "Registrations refused because a host made too many."
    ),
    Series(
        "eldr_drains_total",
        _COUNTER,
        "Drained workers that left the fleet, done or at their limit.",
        ("end",),
    ),
    Series(
        "eldr_workers_forgotten_total",
        _COUNTER,
        "Workers that were silent for so long that they left the list.",
    ),
    Series("eldr_discovery_errors_total", _COUNTER, "DNS look-ups that failed.", ("host",)),
    Series("eldr_link_errors_total", _COUNTER, "Broken links to workers.", ("worker_id",)),
    Series("eldr_reports_total", _COUNTER, "Reports of decoders, by what became of them.", ("result",)),
    Series(
        "eldr_frequency_mismatches_total",
        _COUNTER,
        "Reports whose hit frequencies have another shape than the model.",
        ("worker_id",),
    ),
    # Decoders, as they report themselves.
    Series("eldr_state_age_seconds", _GAUGE, "Time since the last sign of life.", ("worker_id",)),
    Series("eldr_decoder_running", _GAUGE, "Requests that decode.", ("worker_id",)),
    Series("eldr_decoder_waiting", _GAUGE, "Requests that wait in the engine.", ("worker_id",)),
    Series("eldr_decoder_kv_usage_ratio", _GAUGE, "Share of the KV blocks in use.", ("worker_id",)),
    Series(
        "eldr_decoder_expert_union",
        _GAUGE,
        "Distinct experts of the last step, mean over layers.",
        ("worker_id",),
    ),
    Series("eldr_decoder_step_seconds", _GAUGE, "Smoothed time of a decode step.", ("worker_id",)),
    Series("eldr_decoder_steps_total", _COUNTER, "Decode steps.", ("worker_id",)),
    Series("eldr_decoder_tokens_total", _COUNTER, "Tokens decoded.", ("worker_id",)),
    Series(
        "eldr_decoder_union_tokens_total",
        _COUNTER,
        "Decode tokens times expert union: its rate over that of eldr_decoder_tokens_total is the mean union.",
        ("worker_id",),
    ),
    Series("eldr_decoder_step_seconds_total", _COUNTER, "Time spent in decode steps.", ("worker_id",)),
    Series(
        "eldr_load_skew_ratio",
        _GAUGE,
        "Most requests on a live decoder over the mean of the live decoders; 1 is even.",
    ),
    # What is learned.
    Series(
        "eldr_step_time_error_ratio",
        _GAUGE,
        "Recent mean of absolute (observed / predicted - 1).",
        ("model", "group"),
    ),
    Series("eldr_step_time_base_seconds", _GAUGE, "Learned time of an empty step.", ("model", "group")),
    Series("eldr_step_time_request_seconds", _GAUGE, "Learned time that a request adds.", ("model", "group")),
    Series(
        "eldr_step_time_union_seconds", _GAUGE, "Learned time of reading all experts.", ("model", "group")
    ),
    Series(
        "eldr_step_time_kv_token_seconds", _GAUGE, "Learned time that a KV token adds.", ("model", "group")
    ),
    Series("eldr_decode_counts_total", _COUNTER, "Decode counts that came with releases.", ("result",)),
    Series(
        "eldr_predictor_error",
        _GAUGE,
        "Recent distance of predicted and real decode shares, 0 to 1.",
        ("model", "form"),
    ),
    Series("eldr_refits_total", _COUNTER, "Refits of the live centroids, by outcome.", ("result",)),
    Series(
        "eldr_refit_dropped_signatures_total", _COUNTER, "Signatures without a direction, left out of refits."
    ),
    Series("eldr_refit_shift", _GAUGE, "How far the last refit moved the centroids.", ("model",)),
    Series("eldr_refit_signatures", _GAUGE, "Signatures in the last refit.", ("model",)),
    Series(
        "eldr_drift_outside_ratio",
        _GAUGE,
        "Share of recent requests outside the calibrated clusters.",
        ("model",),
    ),
    Series(
        "eldr_drift_distance_ks",
        _GAUGE,
        "Kolmogorov-Smirnov distance of recent and calibrated distances.",
        ("model",),
    ),
    Series(
        "eldr_drift_distance_median",
        _GAUGE,
        "Median distance of recent requests to their centroid.",
        ("model",),
    ),
    Series(
        "eldr_drift_occupancy_tv",
        _GAUGE,
        "Total variation of recent and calibrated cluster shares.",
        ("model",),
    ),
    Series(
        "eldr_drift_occupancy_ratio", _GAUGE, "Share of recent requests in a cluster.", ("model", "cluster")
    ),
    Series("eldr_drift_refit_pays", _GAUGE, "1 where a refit is advised.", ("model",)),
)


def samples(core: RouterCore) -> Iterator[Sample]:
    """All values now."""
    for (name, labels), count in core.counters.snapshot().items():
        yield Sample(name, count, dict(labels))
    for (name, labels), value in core.gauges.snapshot().items():
        yield Sample(name, value, dict(labels))
    yield Sample("eldr_decision_seconds", core.decision_seconds)
    workers = core.workers()
    for (role, health), count in Counter((one.info.role, one.health) for one in workers).items():
        yield Sample("eldr_workers", count, {"role": role.value, "health": health.value})
    for worker in workers:
        yield from _worker(worker)
    loads = [
        one.state.running + one.state.waiting
        for one in workers
        if one.state is not None and one.health is WorkerHealth.LIVE
    ]
    if any(loads):
        yield Sample("eldr_load_skew_ratio", max(loads) * len(loads) / sum(loads))
    groups = [(routing.name, *found) for routing in core.models.all() for found in routing.step_times.items()]
    for served, group, model in groups:
        fit, labelled = model.coefficients, {"model": served, "group": group}
        yield Sample("eldr_step_time_error_ratio", model.error, labelled)
        yield Sample("eldr_step_time_base_seconds", fit.base_s, labelled)
        yield Sample("eldr_step_time_request_seconds", fit.per_request_s, labelled)
        yield Sample("eldr_step_time_union_seconds", fit.per_union_s, labelled)
        yield Sample("eldr_step_time_kv_token_seconds", fit.per_kv_token_s, labelled)


def _worker(worker: WorkerStatus) -> Iterator[Sample]:
    mine = {"worker_id": worker.info.worker_id}
    yield Sample("eldr_bookings", worker.bookings, {**mine, "role": worker.info.role.value})
    if worker.state_age_s >= 0:
        yield Sample("eldr_state_age_seconds", worker.state_age_s, mine)
    state = worker.state
    if state is None or worker.info.role is not WorkerRole.DECODE:
        return
    yield Sample("eldr_decoder_running", state.running, mine)
    yield Sample("eldr_decoder_waiting", state.waiting, mine)
    yield Sample("eldr_decoder_kv_usage_ratio", state.kv_usage, mine)
    yield Sample("eldr_decoder_expert_union", state.union_last, mine)
    yield Sample("eldr_decoder_step_seconds", state.step_time_ewma_s, mine)
    yield Sample("eldr_decoder_steps_total", state.totals.decode_steps, mine)
    yield Sample("eldr_decoder_tokens_total", state.totals.decode_tokens, mine)
    yield Sample("eldr_decoder_union_tokens_total", state.totals.union_tokens, mine)
    yield Sample("eldr_decoder_step_seconds_total", state.totals.step_time_s, mine)
