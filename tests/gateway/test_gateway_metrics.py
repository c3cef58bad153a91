"""What the gateway exports is what it did."""

from pathlib import Path

from gateway_fleet import Fleet

from eldr.gateway.counters import Event
from eldr.gateway.metrics import GATEWAY
from eldr.testing.scraped import Scraped, scraped

ROOT = Path(__file__).resolve().parents[2]
PATH = "/v1/completions"
BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5}


async def read(fleet: Fleet) -> Scraped:
    async with fleet.http.get(fleet.url + "/metrics") as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        return scraped(await response.text())


async def test_requests_are_counted_by_path_and_status_with_their_times(fleet: Fleet) -> None:
    assert (await fleet.complete(BODY))[0] == 200
    assert (await fleet.complete(b"{"))[0] == 400
    async with fleet.http.post(fleet.url + PATH, json={**BODY, "stream": True}) as response:
        await response.read()
    now = await read(fleet)
    assert now["eldr_gateway_requests_total", (("path", PATH), ("status", "200"))] == 2
    assert now["eldr_gateway_requests_total", (("path", PATH), ("status", "400"))] == 1
    assert now["eldr_gateway_request_seconds_count", ()] == 3
    assert now["eldr_gateway_first_token_seconds_count", ()] == 1
    assert now["eldr_gateway_running", ()] == now["eldr_gateway_waiting", ()] == 0
    assert now["eldr_gateway_events_total", (("event", Event.REQUEST_REFUSED.value),)] == 1


def test_the_page_lists_every_series_of_the_gateway() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    for one in GATEWAY.series:
        assert f"| `{one.name}` | {one.kind.value} | {', '.join(one.labels)} | {one.help} |" in page
