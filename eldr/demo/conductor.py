"""The course of a demo run: real servers, calibration, fit, timed rounds, references."""

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from eldr.calibration.atomic_file import file_sha256
from eldr.calibration.counts_file import save_counts
from eldr.calibration.fit import FitSettings, fit
from eldr.client import RouterClient, WorkerClient, WorkerHealth
from eldr.cluster import EngineSettings, FleetConfig, Leg, LocalFleet, VllmServer, free_ports, http_ready
from eldr.demo import probes
from eldr.demo.client import Completion, Request, send_all
from eldr.demo.compare import CountArray, SignatureCheck, compare_outputs, compare_signatures
from eldr.demo.measure import Round, figures_by_policy, steps_by_policy
from eldr.demo.outcome import Outcome
from eldr.demo.references import counts_job, read_counts, reference_outputs
from eldr.demo.settings import DemoSettings
from eldr.demo.source_tree import SourceTree
from eldr.demo.stages import Stages
from eldr.demo.step_log import StepLog
from eldr.demo.workload import WorkItem, completion_body, fits_another_round, mixed_workload, rotated
from eldr.recording import Prompt, RecordSettings, Targets, read_prompts, record

REQUEST_TIMEOUT_S = 600.0
REFERENCE_TIMEOUT_S = 300.0
REGISTER_TIMEOUT_S = 60.0
POLL_S = 0.2
WARM_UP_TOKENS = 2


class DemoError(Exception):
    """The run cannot go on; the message says where it stopped."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the running fleet gave.

    `cold` and `cold_signatures` are those of the warm-up, `signatures` those of the timed rounds;
    `prefix_hit_share` is the share of the rounds' prompt tokens that prefill found in its cache.
    """

    rounds: tuple[Round, ...]
    cold: tuple[Completion, ...]
    cold_signatures: list[CountArray]
    signatures: list[CountArray]
    prefix_hit_share: float

    @property
    def completions(self) -> list[Completion]:
        """All timed requests."""
        return [answer for one in self.rounds for answer in one.completions]


class Demo:
    """One run in a work folder. `run` blocks for minutes; leaving it by any way ends every process."""

    def __init__(self, settings: DemoSettings, tree: SourceTree, work_dir: Path, stages: Stages) -> None:
        self._settings = settings
        self._tree = tree
        self._work_dir = work_dir
        self._stages = stages
        self._model = tree.served_model(settings.width, work_dir)
        self._engine = EngineSettings(str(self._model), max_num_seqs=max(64, settings.concurrency))

    def run(self) -> Outcome:
        """Runs everything. Raises DemoError and what the parts raise."""
        settings = self._settings
        items = self._workload(self._tree.evaluation_prompts, settings.requests)
        calibration = self._workload(self._tree.calibration_prompts, settings.calibration)
        config = FleetConfig(
            self._engine,
            prefill=settings.prefill,
            decode=settings.decode,
            # Prompts repeat from round to round: with a prefix cache a decoder would pull only what it has not
            # seen yet, and rounds would not be alike.
            decode_args=("--no-enable-prefix-caching",),
        )
        with LocalFleet(config, self._work_dir / "logs") as fleet:
            self._start(fleet)
            engine_version = asyncio.run(probes.vllm_version(fleet.layout.prefill[0].http_url))
            profile = asyncio.run(self._calibrate(fleet, [item.prompt for item in calibration]))
            fleet.start_router(f"--profile={profile}")
            fleet.start_gateway()
            measured = asyncio.run(self._measure(fleet, items))
            with self._stages.stage("stopped the fleet", 1):
                fleet.supervisor.stop("gateway", "router", *(server.name for server in fleet.layout.servers))
            return self._compare(fleet, items, measured, engine_version)

    def _workload(self, path: Path, count: int) -> list[WorkItem]:
        return mixed_workload(read_prompts(path), count, self._settings.seed)

    def _start(self, fleet: LocalFleet) -> None:
        servers = fleet.layout.servers
        title = f"started {self._settings.prefill} prefill and {self._settings.decode} decode servers"
        with self._stages.stage(title, len(servers)) as advance:
            for server in servers:
                fleet.start_group([server])
                advance()

    async def _calibrate(self, fleet: LocalFleet, prompts: Sequence[Prompt]) -> Path:
        """Records counts on the running workers, fits a profile, and returns the profile's path."""
        settings, layout = self._settings, fleet.layout
        async with WorkerClient(layout.prefill[0].grpc_address) as client:
            geometry = (await client.get_info()).geometry
        targets = Targets(
            tuple(server.http_url for server in layout.prefill),
            tuple(server.http_url for server in layout.decode),
            self._engine.served_name,
            geometry.moe_layers,
        )
        record_settings = RecordSettings(
            output_tokens=settings.output_tokens,
            seed=settings.seed,
            in_flight=settings.concurrency,
            timeout_s=REQUEST_TIMEOUT_S,
            prompt_tokens=settings.prompt_tokens,
        )
        with self._stages.stage(f"calibrated on {len(prompts)} prompts", len(prompts)) as advance:
            counts = await record(prompts, targets, record_settings, lambda _done: advance())
        counts_path = self._work_dir / "counts.npz"
        save_counts(counts, counts_path)
        with self._stages.stage(f"fitted {settings.decode} clusters", 1):
            result = fit(
                counts,
                FitSettings(clusters=settings.decode, seed=settings.seed),
                counts_sha256=file_sha256(counts_path),
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                eldr_version=version("eldr"),
            )
        self._stages.line(result.choice)
        profile_path = self._work_dir / "profile.eldr"
        result.profile.save(profile_path)
        return profile_path

    async def _measure(self, fleet: LocalFleet, items: Sequence[WorkItem]) -> Measured:
        """Warms everything alike, then times the rounds."""
        settings, layout = self._settings, fleet.layout
        prefill_urls = [server.http_url for server in layout.prefill]
        rounds: list[Round] = []
        async with AsyncExitStack() as stack:
            router = await stack.enter_async_context(RouterClient(layout.router_address))
            decoders = [
                await stack.enter_async_context(WorkerClient(server.grpc_address)) for server in layout.decode
            ]
            log = await stack.enter_async_context(
                probes.SignatureLog([server.grpc_address for server in layout.prefill])
            )
            await self._await_workers(router, len(layout.servers))
            cold = await self._send(fleet, items, WARM_UP_TOKENS, "warmed the prefix caches")
            cold_signatures = await log.settle(len(items))
            before = await probes.prefix_cache(prefill_urls)
            signatures: list[CountArray] = []
            began = time.monotonic()
            for number in range(settings.rounds):
                if not fits_another_round(time.monotonic() - began, number, settings.rounds_limit_s):
                    self._stages.line(f"{number} of {settings.rounds} rounds: another would exceed the limit")
                    break
                for policy in rotated(settings.policies, number):
                    await router.set_policy(policy)
                    start = await probes.read_totals(decoders, fleet.decode_cpu_seconds())
                    title = f"round {number + 1} of {settings.rounds}, {policy}"
                    async with _steps_of(router) as log_of_steps:
                        completions = await self._send(fleet, items, settings.output_tokens, title)
                    end = await probes.read_totals(decoders, fleet.decode_cpu_seconds())
                    steps = tuple(log_of_steps.samples)
                    rounds.append(Round(policy, tuple(completions), end.since(start), steps))
                    signatures += await log.settle(len(items))
                    fleet.supervisor.check()
            after = await probes.prefix_cache(prefill_urls)
            if log.dropped:
                raise DemoError(
                    f"{log.dropped} signatures were lost on their way; nothing can be said of all"
                )
        looked_up = after[0] - before[0]
        share = (after[1] - before[1]) / looked_up if looked_up else 0.0
        return Measured(tuple(rounds), tuple(cold), cold_signatures, signatures, share)

    async def _await_workers(self, router: RouterClient, wanted: int) -> None:
        live: list[str] = []
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT_S):
                while len(live) < wanted:
                    await asyncio.sleep(POLL_S)
                    workers = await router.workers()
                    live = [one.info.worker_id for one in workers if one.health is WorkerHealth.LIVE]
        except TimeoutError:
            raise DemoError(f"{wanted} workers should be live at the router, it has {sorted(live)}") from None

    async def _send(
        self, fleet: LocalFleet, items: Sequence[WorkItem], output_tokens: int, title: str
    ) -> list[Completion]:
        with self._stages.stage(title, len(items)) as advance:
            completions = await send_all(
                fleet.layout.gateway_url,
                self._requests(items, output_tokens),
                self._settings.concurrency,
                REQUEST_TIMEOUT_S,
                advance,
            )
        for failed in [answer for answer in completions if answer.error][:3]:
            self._stages.line(f"{failed.request_id}: {failed.error}")
        return completions

    def _requests(self, items: Sequence[WorkItem], output_tokens: int) -> list[Request]:
        settings, model = self._settings, self._engine.served_name
        return [
            Request(
                item.prompt.id,
                item.prompt.domain,
                completion_body(item, model, settings.prompt_tokens, output_tokens),
            )
            for item in items
        ]

    def _compare(
        self, fleet: LocalFleet, items: Sequence[WorkItem], measured: Measured, engine_version: str
    ) -> Outcome:
        """Runs both references on the freed cores and compares with what the fleet gave."""
        tokens = {
            answer.request_id: answer.prompt_token_ids for answer in measured.completions if not answer.error
        }
        supervisor, folder = fleet.supervisor, self._work_dir
        job = counts_job(self._tree.reference_script, self._tree.model, list(tokens.values()), folder)
        server = self._ordinary_server()
        with self._stages.stage("one ordinary vLLM server", len(items)) as advance:
            supervisor.start(job)
            supervisor.start(server.command())
            supervisor.wait_ready(
                server.name, http_ready(f"{server.http_url}/health"), fleet.config.start_timeout_s
            )
            outputs = asyncio.run(
                reference_outputs(
                    server.http_url,
                    self._requests(items, self._settings.output_tokens),
                    self._settings.concurrency,
                    REQUEST_TIMEOUT_S,
                    advance,
                )
            )
            supervisor.stop(server.name)
        with self._stages.stage("Hugging Face's expert counts", 1):
            supervisor.wait_ended(job.name, REFERENCE_TIMEOUT_S)
        counts = dict(zip(tokens, read_counts(folder, len(tokens)), strict=True))
        return Outcome(
            vllm_version=engine_version,
            policies=figures_by_policy(measured.rounds),
            outputs=compare_outputs(measured.completions, outputs),
            signatures=_check_signatures(measured, counts),
            prefix_hit_share=measured.prefix_hit_share,
            settings=self._settings,
            steps=steps_by_policy(measured.rounds),
        )

    def _ordinary_server(self) -> VllmServer:
        """Without a connector, and with a step that takes all prompts whole: a seeded prompt in chunks kills
        vLLM 0.32.0 on a CPU."""
        settings = self._settings
        whole = max(2048, settings.concurrency * settings.prompt_tokens)
        return VllmServer(
            "ordinary",
            Leg.WHOLE,
            self._engine,
            http_port=free_ports(1)[0],
            core=0,
            extra_args=(f"--max-num-batched-tokens={whole}",),
        )


@asynccontextmanager
async def _steps_of(router: RouterClient) -> AsyncIterator[StepLog]:
    """Samples decode steps meanwhile. Raises what ended the sampling."""
    log = StepLog()
    following = asyncio.create_task(log.follow(router.workers))
    try:
        yield log
    finally:
        following.cancel()
        (ended,) = await asyncio.gather(following, return_exceptions=True)
    if isinstance(ended, Exception):
        raise ended


def _check_signatures(measured: Measured, counts: dict[str, CountArray]) -> SignatureCheck:
    """Warm-up (cold caches) and rounds (prefix hits), each against what was sent then."""

    def expected(completions: Sequence[Completion]) -> list[CountArray]:
        return [counts[answer.request_id] for answer in completions if answer.request_id in counts]

    cold = compare_signatures(expected(measured.cold), measured.cold_signatures)
    warm = compare_signatures(expected(measured.completions), measured.signatures)
    return SignatureCheck(warm.checked, cold.wrong + warm.wrong)
