"""What a scrape of `/metrics` says, as Prometheus' own parser reads it."""

from prometheus_client.parser import text_string_to_metric_families

Scraped = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Value of every sample by its name and its labels, sorted by label name."""


def scraped(text: str) -> Scraped:
    """All samples of a text exposition. Raises ValueError where the text is none."""
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }
