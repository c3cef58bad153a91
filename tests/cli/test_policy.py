import json

from click.testing import CliRunner
from served_router import eldr, served_router

from eldr.cli.main import cli
from eldr.rpc.worker_info import WorkerRole
from eldr.testing.fake_services import fake_info


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


async def test_of_several_models_one_is_named_or_all_are_meant():
    async with served_router() as (server, address):
        for worker_id, served in (("d0", "one"), ("d1", "two")):
            server.core.register(fake_info(worker_id, WorkerRole.DECODE, served_model=served))
        asked = await eldr("policy", "get", "--router", address)
        assert asked.code == 1
        assert "model must be named, since several are served: one, two" in asked.err
        await eldr("policy", "set", "jsq", "--model", "two", "--router", address)
        assert [routing.policy[0] for routing in server.core.models.all()] == ["union-cost", "jsq"]
        await eldr("policy", "set", "p2c", "--router", address)
        assert [routing.policy[0] for routing in server.core.models.all()] == ["p2c", "p2c"]


def test_an_option_that_is_no_number_is_refused():
    for pair in ("tau", "tau=", "=1", "tau=wide"):
        ended = CliRunner().invoke(cli, ["policy", "set", "jsq", "-o", pair])
        assert ended.exit_code == 2
        assert "must be KEY=NUMBER" in ended.output
