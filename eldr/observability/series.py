"""What a process exports: every series with its meaning, in one place, and the text that Prometheus reads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from eldr.observability.histogram import Histogram

MAX_LABEL_SETS = 2000
"""Label sets of one series; what comes beyond is dropped and counted, so that no fleet floods a monitor."""

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of Prometheus' text format."""

DROPPED = "eldr_metrics_dropped_label_sets"


class Kind(StrEnum):
    """The three kinds of series."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Series:
    """One series: its full name as it is exported, its meaning with unit, and the names of its labels."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.startswith("eldr_"):
            raise ValueError(f"series names start with eldr_, got {self.name!r}")
        if (self.kind is Kind.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"counters, and only they, end in _total, got {self.name!r}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a series now; a Histogram for histograms."""

    name: str
    value: float | Histogram
    labels: Mapping[str, str] = field(default_factory=dict)


class UnknownSeriesError(ValueError):
    """A sample of a series, or with labels, that the catalogue does not have."""


class Catalogue:
    """The series of one process. Raises ValueError where a name comes twice."""

    def __init__(self, *series: Series) -> None:
        dropped = Series(
            DROPPED, Kind.GAUGE, "Label sets left out because a series has too many.", ("series",)
        )
        self.series = (*series, dropped)
        self._by_name = {one.name: one for one in self.series}
        if len(self._by_name) < len(self.series):
            raise ValueError("a series is in the catalogue twice")

    def families(self, samples: Iterable[Sample]) -> list[Metric]:
        """Prometheus' families of all samples, in the catalogue's order. Raises UnknownSeriesError."""
        by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            series = self._by_name.get(sample.name)
            if series is None or set(sample.labels) != set(series.labels):
                raise UnknownSeriesError(
                    f"{sample.name} with labels {sorted(sample.labels)} is not in the catalogue"
                )
            by_name.setdefault(sample.name, []).append(sample)
        over = {name: len(mine) - MAX_LABEL_SETS for name, mine in by_name.items()}
        by_name[DROPPED] = [
            Sample(DROPPED, count, {"series": name}) for name, count in over.items() if count > 0
        ]
        return [_family(one, by_name.get(one.name, [])[:MAX_LABEL_SETS]) for one in self.series]


def _family(series: Series, samples: list[Sample]) -> Metric:
    labels = series.labels
    if series.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(series.name, series.help, labels=labels)
        for sample in samples:
            assert isinstance(sample.value, Histogram)
            values = [sample.labels[name] for name in labels]
            histogram.add_metric(values, sample.value.cumulative(), sum_value=sample.value.sum)
        return histogram
    make = CounterMetricFamily if series.kind is Kind.COUNTER else GaugeMetricFamily
    family = make(series.name.removesuffix("_total"), series.help, labels=labels)
    for sample in samples:
        assert not isinstance(sample.value, Histogram)
        family.add_metric([sample.labels[name] for name in labels], sample.value)
    return family


class _Given(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(catalogue: Catalogue, samples: Iterable[Sample]) -> bytes:
    """The samples as Prometheus' text format. Raises UnknownSeriesError."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(catalogue.families(samples)))
    return generate_latest(registry)
