"""What a catalogue exports, and what it refuses."""

import pytest

from eldr.observability.histogram import Histogram
from eldr.observability.series import (
    DROPPED,
    MAX_LABEL_SETS,
    Catalogue,
    Kind,
    Sample,
    Series,
    UnknownSeriesError,
    exposition,
)
from eldr.testing.scraped import Scraped, scraped

CATALOGUE = Catalogue(
    Series("eldr_a_total", Kind.COUNTER, "Things.", ("kind",)),
    Series("eldr_b", Kind.GAUGE, "Now.", ("worker_id",)),
    Series("eldr_c_seconds", Kind.HISTOGRAM, "Time."),
)


def values(*samples: Sample) -> Scraped:
    return scraped(exposition(CATALOGUE, samples).decode())


def test_counters_and_gauges_come_back_as_prometheus_reads_them() -> None:
    read = values(Sample("eldr_a_total", 3, {"kind": 'x"\n'}), Sample("eldr_b", -1.5, {"worker_id": "d"}))
    assert read["eldr_a_total", (("kind", 'x"\n'),)] == 3
    assert read["eldr_b", (("worker_id", "d"),)] == -1.5


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.5, 0.7, 9.0):
        histogram.observe(value)
    read = values(Sample("eldr_c_seconds", histogram))
    bounds = {
        labels[0][1]: value for (name, labels), value in read.items() if name == "eldr_c_seconds_bucket"
    }
    assert bounds == {"0.1": 1, "1.0": 3, "+Inf": 4}
    assert read["eldr_c_seconds_sum", ()] == pytest.approx(10.3)
    assert read["eldr_c_seconds_count", ()] == 4


def test_a_flood_of_label_sets_is_cut_and_counted() -> None:
    read = values(*(Sample("eldr_b", 1, {"worker_id": str(i)}) for i in range(MAX_LABEL_SETS + 7)))
    assert sum(name == "eldr_b" for name, _ in read) == MAX_LABEL_SETS
    assert read[DROPPED, (("series", "eldr_b"),)] == 7


@pytest.mark.parametrize(
    "sample", [Sample("eldr_z", 1), Sample("eldr_b", 1), Sample("eldr_b", 1, {"worker_id": "d", "more": "x"})]
)
def test_a_sample_that_the_catalogue_lacks_is_named(sample: Sample) -> None:
    with pytest.raises(UnknownSeriesError, match=sample.name):
        exposition(CATALOGUE, [sample])


@pytest.mark.parametrize(
    ("name", "kind"), [("a_total", Kind.COUNTER), ("eldr_a", Kind.COUNTER), ("eldr_a_total", Kind.GAUGE)]
)
def test_a_badly_named_series_is_refused(name: str, kind: Kind) -> None:
    with pytest.raises(ValueError, match=name):
        Series(name, kind, "")


def test_a_name_comes_once() -> None:
    one = Series("eldr_b", Kind.GAUGE, "")
    with pytest.raises(ValueError, match="twice"):
        Catalogue(one, one)


def test_bounds_of_a_histogram_ascend() -> None:
    with pytest.raises(ValueError, match="ascend"):
        Histogram((1.0, 0.5))
