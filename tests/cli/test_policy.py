import json

from click.testing import CliRunner
from served_router import eldr, served_router

from eldr.cli.main import cli


async def test_the_policy_is_shown_and_switched():
    async with served_router() as (server, address):
        shown = await eldr("policy", "get", "--router", address)
        assert shown.out.startswith("union-cost "), shown.err
        assert (
            "available: domain, jsq, locality-band-online, p2c, random, round-robin, union-cost" in shown.out
        )

        switched = await eldr("policy", "set", "union-cost", "-o", "tail_guard=0.2", "--router", address)
        assert switched.code == 0, switched.err
        assert server.core.models.find("").policy[1]["tail_guard"] == 0.2
        as_json = json.loads((await eldr("policy", "get", "--json", ELDR_ROUTER=address)).out)
        assert as_json["options"]["tail_guard"] == 0.2

        refused = await eldr("policy", "set", "jsq", "-o", "tau=1", "--router", address)
        assert refused.code == 1
        assert "policy jsq: unknown option 'tau', it takes none (INVALID_ARGUMENT)" in refused.err


def test_an_option_that_is_no_number_is_refused():
    for pair in ("tau", "tau=", "=1", "tau=wide"):
        ended = CliRunner().invoke(cli, ["policy", "set", "jsq", "-o", pair])
        assert ended.exit_code == 2
        assert "must be KEY=NUMBER" in ended.output
