"""The fold against SGLang's worker code: names, signatures, the accept that it replaces, which steps it takes."""

from __future__ import annotations

import ast
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative.dspark.dspark_accept import AcceptGreedy, FinalizeAcceptLens
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.dspark_components import dspark_verify, dspark_worker_v2
from sglang.srt.speculative.dspark_components.dspark_verify import AcceptOuts
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from sgl_mega_plugin.contract import Host, Plan
from sgl_mega_plugin.engine.fold import install, worker
from sgl_mega_plugin.engine.fold.buffers import SNAPSHOTS, AcceptBuffers
from sgl_mega_plugin.engine.fold.draft_kv import DraftKv
from sgl_mega_plugin.engine.fold.eligible import is_greedy_step, serves_step, wants_nothing_else
from sgl_mega_plugin.engine.fold.epilogue import Calls, DraftSide, Noise, VerifyEpilogue
from sgl_mega_plugin.engine.fold.one_graph import GraphError, OneGraph, keeping_graphs
from sgl_mega_plugin.engine.fold.steady import SteadyStep, _Shape, steady_reasons
from sgl_mega_plugin.registry import Registry, load_reference

MAX_BATCH, ROWS, VOCAB, POOL = 4, 4, 37, 9
LAYERS, HEADS, SIZE, SLOTS = 2, 1, 8, 64
UNTOUCHED = -7


# -- names and signatures ----------------------------------------------------------------------------------------------


def _attributes_of(module: Any, owners: tuple[str, ...], *, inside: tuple[str, ...]) -> set[str]:
    """What the classes ``inside`` a module read of a value called like one of ``owners``."""
    found = set()
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef) and node.name in inside:
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute):
                    value = part.value
                    name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", None)
                    if name in owners:
                        found.add(part.attr)
    return found


def test_the_epilogue_has_every_name_that_sglangs_worker_asks_for() -> None:
    asked = _attributes_of(dspark_worker_v2, ("_verify_epilogue", "epilogue"), inside=("DSparkWorkerV2",))
    asked |= _attributes_of(dspark_verify, ("verify_epilogue",), inside=("TargetVerifyExecutor",))
    compact = {"strided_logits", "strided_hidden", "draft_tokens_buf"}  # read by ragged verify alone
    assert compact <= asked
    assert asked - compact == install.EPILOGUE_NAMES
    for name in install.EPILOGUE_NAMES - {"future_relay"}:  # set in the constructor
        assert hasattr(VerifyEpilogue, name), name
    graph = _attributes_of(dspark_worker_v2, ("_sampling_accept_graph",), inside=("DSparkWorkerV2",))
    assert {name for name in graph if not hasattr(VerifyEpilogue, name)} == set()


def test_sglangs_worker_is_what_the_fold_was_written_for() -> None:
    assert install.signature_reasons(dspark_worker_v2.DSparkWorkerV2) == []


def test_another_worker_is_refused_with_what_differs() -> None:
    class Other:
        def init_attention_backends(self, extra: int) -> None: ...

    (first, *others) = install.signature_reasons(Other)
    assert first == "init_attention_backends() takes ['extra'], not []"
    assert others == [f"it has no {name}()" for name in install.OVERRIDDEN if name != "init_attention_backends"]


def test_the_class_is_replaced_where_sglang_takes_it_from() -> None:
    base = dspark_worker_v2.DSparkWorkerV2
    for _ in range(2):  # a second call replaces the replacement, and does not stack upon it
        install.install(_plan())
        found = SpeculativeAlgorithm.DSPARK.create_worker(SimpleNamespace())
        assert found is dspark_worker_v2.DSparkWorkerV2
        assert found.__mro__[1] is base


def test_a_worker_of_another_class_stops_the_server() -> None:
    install.install(_plan())
    with pytest.raises(RuntimeError, match="SGLang made another worker"):
        install.prove()
    with pytest.raises(TypeError):  # no arguments: the proof is set before SGLang's constructor runs
        dspark_worker_v2.DSparkWorkerV2()
    install.prove()


def test_without_an_installation_there_is_nothing_to_prove() -> None:
    install.prove()


# -- the accept, beside SGLang's ---------------------------------------------------------------------------------------


def _plan() -> Plan:
    host = Host(runtime="sglang", isa="sm_90", backend="kernel")
    return Plan(host=host, active=(), inactive=())


def _slot(name: str) -> Any:
    return load_reference(Registry.discover().get(name))


class Step:
    """One verify graph on the CPU: static inputs, the tail hook, and what the pools hold."""

    def __init__(self, *, samples: bool = False, simulated: int | None = None, filtered: bool = False) -> None:
        draw = torch.Generator().manual_seed(3)
        self.keys = tuple(torch.full((SLOTS, HEADS, SIZE), float(UNTOUCHED)) for _ in range(LAYERS))
        self.values = tuple(torch.full((SLOTS, HEADS, SIZE), float(UNTOUCHED)) for _ in range(LAYERS))
        self.table = SimpleNamespace(
            new_seq_lens=torch.full((POOL,), UNTOUCHED), output_tokens=torch.full((POOL,), UNTOUCHED), adopted=True
        )
        self.temperatures = torch.zeros(MAX_BATCH)
        self.offset = torch.zeros(1, dtype=torch.int64)
        self.step_logits = torch.randn(MAX_BATCH, ROWS - 1, VOCAB, generator=draw)
        self.epilogue = VerifyEpilogue(
            calls=Calls(
                accept=_slot("blockwise_rejection" if samples else "accept_tail"),
                samples=samples,
                context_kv=_slot("context_kv"),
                relay=_slot("relay"),
                cutoffs=_slot("sampling_cutoffs") if filtered else None,
            ),
            draft=DraftSide(step_logits=self.step_logits, temperatures=self.temperatures),
            draft_kv=DraftKv(
                project=lambda hidden: hidden.view(len(hidden), LAYERS, 2, HEADS, SIZE),
                k_norm_weights=torch.ones(LAYERS, SIZE),
                cos_sin=torch.cat([torch.ones(200, SIZE // 2), torch.zeros(200, SIZE // 2)], dim=1),
                neox=True,
                eps=1e-6,
                keys=self.keys,
                values=self.values,
            ),
            noise=Noise(key=11, offset=self.offset),
            max_batch=MAX_BATCH,
            rows=ROWS,
            device="cpu",
            accept_outs=AcceptOuts,
            relay_buffers=lambda: self.table,
            simulated_correct_len=None if simulated is None else torch.tensor([simulated]),
        )
        self.logits = torch.randint(-9, 10, (MAX_BATCH * ROWS, VOCAB), generator=draw).float()
        winners = self.logits.view(MAX_BATCH, ROWS, VOCAB).argmax(-1)
        wrong = torch.randint(0, VOCAB, (MAX_BATCH, ROWS), generator=draw)
        keep = torch.rand(MAX_BATCH, ROWS, generator=draw) < 0.7
        self.candidates = torch.cat([wrong[:, :1], torch.where(keep, winners, wrong)[:, :-1]], dim=1)
        self.hidden = torch.randn(MAX_BATCH * ROWS, LAYERS * 2 * HEADS * SIZE, generator=draw)
        self.seq_lens = torch.tensor([5, 17, 100, 1])
        self.pool_rows = torch.tensor([3, 8, 1, 6])
        self.locations = torch.arange(1, 1 + MAX_BATCH * ROWS)

    def replay(self) -> None:
        forward_batch = SimpleNamespace(
            batch_size=MAX_BATCH,
            forward_mode=SimpleNamespace(is_target_verify=lambda: True),
            input_ids=self.candidates.flatten(),
            seq_lens=self.seq_lens,
            req_pool_indices=self.pool_rows,
            positions=(self.seq_lens[:, None] + torch.arange(ROWS)).flatten(),
            out_cache_loc=self.locations,
        )
        out = SimpleNamespace(next_token_logits=self.logits, hidden_states=self.hidden)
        runner = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=False))
        self.epilogue.capture_hook(runner, out, forward_batch, MAX_BATCH * ROWS)

    def written(self) -> list[int]:
        """Slots of the KV pool that hold something."""
        return (self.keys[0] != UNTOUCHED).flatten(1).any(1).nonzero().flatten().tolist()


def _sglangs_accept(step: Step, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    correct, bonus, trimmed = AcceptGreedy.torch(
        candidates=step.candidates[:batch],
        target_logits=step.logits[: batch * ROWS],
        verify_num_draft_tokens=ROWS,
        cutoff_verify_lens=None,
    )
    lengths = FinalizeAcceptLens.torch(correct_len=correct, cap_trim_lens=trimmed, prefix_lens=step.seq_lens[:batch])
    return correct, bonus, lengths.commit_lens, lengths.new_seq_lens


@pytest.mark.parametrize("samples", [False, True], ids=["greedy-slot", "sampled-slot"])
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_an_armed_greedy_step_is_sglangs_and_padding_rows_write_nothing(batch: int, samples: bool) -> None:
    step = Step(samples=samples)
    step.epilogue.begin_static_step(batch, True)
    step.replay()
    step.epilogue.note_static_verify(batch)
    found = step.epilogue.read_accept(batch)
    correct, bonus, commit, lens = _sglangs_accept(step, batch)
    for name, value in (("correct_len", correct.int()), ("bonus", bonus), ("commit_lens", commit)):
        assert getattr(found, name).tolist() == value.tolist(), name
    assert found.new_seq_lens.tolist() == lens.tolist()
    assert found.cap_trim_lens.tolist() == [0] * batch
    assert step.epilogue.read_block_accept_lens(batch).tolist() == commit.tolist()
    for row in range(batch):
        assert found.out_tokens[row, : commit[row]].tolist() == [
            *step.candidates[row, 1 : commit[row]].tolist(),
            int(bonus[row]),
        ]
    rows = step.pool_rows[:batch].tolist()
    expected = {row: (int(lens[i]), int(bonus[i])) for i, row in enumerate(rows)}
    for row in range(POOL):
        pair = (int(step.table.new_seq_lens[row]), int(step.table.output_tokens[row]))
        assert pair == expected.get(row, (UNTOUCHED, UNTOUCHED)), row
    places = step.locations.view(MAX_BATCH, ROWS)
    assert step.written() == sorted(int(places[i, t]) for i in range(batch) for t in range(int(commit[i])))
    assert int(step.offset) == 0  # no row drew a token


def test_a_step_that_is_not_folded_writes_nothing() -> None:
    step = Step()
    step.epilogue.begin_static_step(3, True)
    step.epilogue.begin_static_step(3, False)
    step.replay()
    assert step.written() == []
    assert step.table.new_seq_lens.tolist() == step.table.output_tokens.tolist() == [UNTOUCHED] * POOL
    step.epilogue.begin_static_step(3, True)
    step.epilogue.begin_step(None, False)  # an idle rank's
    step.replay()
    assert step.written() == []


def test_results_outlive_the_replays_that_follow() -> None:
    """The host may copy a step's results after the next replay has begun."""
    step = Step()
    step.epilogue.begin_static_step(MAX_BATCH, True)
    read = []
    for _ in range(SNAPSHOTS):
        step.replay()
        found = step.epilogue.read_accept(MAX_BATCH)
        read.append((found, found.bonus.tolist()))
        step.logits = step.logits.roll(1, dims=1)
    assert len({tuple(bonus) for _, bonus in read}) == SNAPSHOTS
    assert [found.bonus.tolist() for found, _ in read] == [bonus for _, bonus in read]


def test_snapshots_share_no_memory_with_what_the_graph_writes() -> None:
    buffers = AcceptBuffers(max_batch=3, rows=2, device="cpu")
    for name, value in vars(buffers.live(3)).items():
        value.fill_(5)
        assert getattr(buffers.snapshot(3), name).eq(5).all(), name
        value.fill_(6)
        assert not getattr(buffers._rows(buffers._last, 3), name).eq(6).any(), name


@pytest.mark.parametrize("folded", [False, True], ids=["eager-draft", "draft-in-its-graph"])
def test_sampled_steps_are_armed_only_behind_the_drafts_graph(folded: bool) -> None:
    step = Step(samples=True)
    step.temperatures[:] = torch.tensor([0.7, 0.0, 1.0, 1.0])
    step.epilogue.sampled_step, step.epilogue.proposal_folded = True, folded
    step.epilogue.begin_static_step(3, False)
    assert step.epilogue.sampled_armed is folded
    step.replay()
    found = step.epilogue.run(bs=3, target_logits=step.logits)
    assert int(step.offset) == int(folded)
    if not folded:
        assert step.written() == []
        return
    _, bonus, commit, _ = _sglangs_accept(step, 3)
    assert (int(found.bonus[1]), int(found.commit_lens[1])) == (int(bonus[1]), int(commit[1]))  # the greedy row
    assert len(step.written()) == int(found.commit_lens.sum())


def test_a_filtered_step_accepts_from_the_filtered_law_and_the_next_one_from_the_whole() -> None:
    """top_k 1 leaves the argmax alone: a sampled row then commits what a greedy one does."""
    step = Step(samples=True, filtered=True)
    step.temperatures[:] = 0.7
    filters = step.epilogue.filters
    assert filters is not None
    info = SimpleNamespace(
        is_all_greedy=False,
        need_top_k_sampling=True,
        need_top_p_sampling=False,
        need_min_p_sampling=False,
        top_ks=torch.tensor([1, 1, 1], dtype=torch.int32),
        top_ps=torch.ones(3),
        min_ps=torch.zeros(3),
    )
    step.epilogue.sampled_step = step.epilogue.proposal_folded = True
    ties = [int((row == row.max()).sum()) for row in step.logits]
    filters.stage(info, 3)
    step.epilogue.begin_static_step(3, False)
    step.replay()
    found = step.epilogue.read_accept(3)
    for row in range(3):
        end = int(found.commit_lens[row])
        for t, token in enumerate(found.out_tokens[row, :end].tolist()):
            logits = step.logits[row * ROWS + t]
            assert logits[token] == logits.max(), (row, t, ties)
    info.top_ks[0] = 2  # in place
    filters.stage(info, 3)
    assert filters.top_ks[:3].tolist() == [2, 1, 1]
    info.is_all_greedy = True  # as SGLang's greedy requests are, whose top_k is 1
    filters.stage(info, 3)
    step.replay()
    assert filters.cutoffs[: 3 * ROWS].eq(-torch.inf).all()


def test_simulated_acceptance_overrides_the_length_of_live_rows() -> None:
    step = Step(simulated=2)
    assert step.epilogue.serves_sampled
    step.epilogue.begin_static_step(3, True)
    step.replay()
    found = step.epilogue.read_accept(3)
    _, bonus, _, _ = _sglangs_accept(step, 3)
    assert found.commit_lens.tolist() == [3, 3, 3]
    assert found.bonus.tolist() == bonus.tolist()  # SGLang keeps the bonus of the real accept
    assert len(step.written()) == 9


# -- which steps -------------------------------------------------------------------------------------------------------


def _batch(*params: dict[str, Any], has_grammar: bool = False, **info: Any) -> Any:
    """A decode batch of requests with these sampling parameters, and what else its sampling info says."""
    plain = {"top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0}
    requests = [SimpleNamespace(sampling_params=SimpleNamespace(**(plain | given))) for given in params]
    sampling = SimpleNamespace(
        is_all_greedy=all(request.sampling_params.top_k <= 1 for request in requests),
        has_custom_logit_processor=False,
        **info,
    )
    return SimpleNamespace(sampling_info=sampling, has_grammar=has_grammar, reqs=requests)


@pytest.mark.parametrize(
    ("batch", "real", "simulated"),
    [
        pytest.param(_batch({}), True, True, id="sampled"),
        pytest.param(_batch({}, {"top_k": 1, "top_p": 0.9}), True, True, id="a-greedy-row-among-them"),
        pytest.param(_batch({"top_k": 1}), False, False, id="all-greedy-is-sglangs-own-decision"),
        pytest.param(_batch({"top_k": 20}), False, True, id="top-k"),
        pytest.param(_batch({"top_p": 0.9}), False, True, id="top-p"),
        pytest.param(_batch({"min_p": 0.1}), False, True, id="min-p"),
        pytest.param(_batch({}, has_grammar=True), False, False, id="grammar"),
        pytest.param(_batch({}, logit_bias=torch.zeros(1)), False, False, id="logit-bias"),
        pytest.param(_batch({}, acc_linear_penalties=torch.zeros(1)), False, False, id="penalties"),
        pytest.param(SimpleNamespace(sampling_info=None, has_grammar=False, reqs=[]), False, False, id="no-parameters"),
    ],
)
def test_which_sampled_steps_are_folded(batch: Any, real: bool, simulated: bool) -> None:
    assert serves_step(batch, simulated=False, filtered=False) is real
    assert serves_step(batch, simulated=True, filtered=False) is simulated
    assert serves_step(batch, simulated=False, filtered=True) is simulated  # a slot filters: what is left is the logits


# -- the worker --------------------------------------------------------------------------------------------------------


def _worker(**changes: Any) -> Any:
    plain = SimpleNamespace(kv_index_translator=SimpleNamespace(reads_are_translated=False), token_to_kv_pool=None)
    values: dict[str, Any] = {
        "_hosts_draft": True,
        "_verify_epilogue": None,
        "_verify_planner": SimpleNamespace(mode_value="static"),
        "_decode_graph_allowed": True,
        "_draft_is_moe": False,
        "_need_mamba_verify_commit": False,
        "model_runner": plain,
        "draft_model_runner": plain,
        "draft_model": SimpleNamespace(_fused_kv_write_bundle=lambda pool: object()),
    }
    return SimpleNamespace(**(values | changes))


_VIRTUAL = SimpleNamespace(kv_index_translator=SimpleNamespace(reads_are_translated=True), token_to_kv_pool=None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"_hosts_draft": False}, "has no draft"),
        ({"_verify_epilogue": object()}, "an epilogue of its own"),
        ({"_verify_planner": SimpleNamespace(mode_value="compact")}, "'compact', not 'static'"),
        ({"_decode_graph_allowed": False}, "CUDA graphs are off"),
        ({"_draft_is_moe": True}, "mixture of experts"),
        ({"_need_mamba_verify_commit": True}, "recurrent states"),
        ({"draft_model_runner": _VIRTUAL}, "the draft's KV pool has virtual slots"),
        ({"draft_model": SimpleNamespace(_fused_kv_write_bundle=lambda pool: None, layers=[])}, "neither plain bf16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_worker_that_cannot_fold_says_why(changes: dict[str, Any], reason: str) -> None:
    assert worker.worker_reasons(_worker()) == []
    (found,) = worker.worker_reasons(_worker(**changes))
    assert reason in found


def test_a_graph_without_the_epilogue_stops_the_server() -> None:
    epilogue = Step().epilogue
    epilogue.captured = {1, 2}
    runner = SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(capture_bs=[1, 2]))
    worker.check_captured(SimpleNamespace(model_runner=runner), epilogue)
    runner.decode_cuda_graph_runner.capture_bs = [1, 2, 4]
    with pytest.raises(RuntimeError, match=r"batch sizes \[4\]"):
        worker.check_captured(SimpleNamespace(model_runner=runner), epilogue)


# -- steady steps ------------------------------------------------------------------------------------------------------


def test_a_greedy_step_is_one_whose_logits_stand() -> None:
    assert is_greedy_step(_batch({"top_k": 1}))
    assert is_greedy_step(SimpleNamespace(sampling_info=None, has_grammar=False))
    assert not is_greedy_step(_batch({}, {"top_k": 1}))
    assert not is_greedy_step(_batch({"top_k": 1}, has_grammar=True))
    assert not is_greedy_step(_batch({"top_k": 1}, logit_bias=torch.zeros(1)))


@pytest.mark.parametrize("asked", ["return_logprob", "return_hidden_states", "sampling_mask"])
def test_a_step_that_is_asked_for_more_than_tokens_stays_with_sglang(asked: str) -> None:
    batch = _batch({}, sampling_mask_batch_indices=torch.zeros(1) if asked == "sampling_mask" else None)
    batch.return_logprob, batch.return_hidden_states = asked == "return_logprob", asked == "return_hidden_states"
    assert not wants_nothing_else(batch)
    batch = _batch({}, sampling_mask_batch_indices=None)
    batch.return_logprob = batch.return_hidden_states = False
    assert wants_nothing_else(batch)


class _Lens(Tensor):
    """Lengths that may be told of a stream, as on a GPU."""

    def __new__(cls, lens: Tensor) -> Any:
        return lens.clone().as_subclass(cls)

    def record_stream(self, stream: Any) -> None:
        self.streams = getattr(self, "streams", 0) + 1


class SteadyWorker:
    """A worker whose forwards note that they ran; its verify is the CPU step's tail hook."""

    def __init__(self, step: Step, events: list[str]) -> None:
        runner = SimpleNamespace(shared_read_done_event=None)
        self.model_runner = self.draft_model_runner = self.last_shared_read_runner = runner
        self.verify_num_draft_tokens = ROWS
        self._simulated_correct_len = None
        self._proposer = SimpleNamespace(
            _stage_sampling_params=lambda sampler, *, bs, sampling_info: events.append(f"parameters of {bs}")
        )
        self._verify_executor = SimpleNamespace(begin_simulated_step=lambda: events.append("simulated draw"))
        self._future_relay_in_graph = lambda *, run_compact, folded_accept: step.table


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_a_steady_step_launches_in_order_and_hands_on_what_was_accepted(
    monkeypatch: pytest.MonkeyPatch, greedy: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    events: list[str] = []
    step = Step(samples=True)
    step.temperatures[:] = 0.0 if greedy else 0.7
    step.epilogue.sampled_step = not greedy
    steady = SteadyStep(SteadyWorker(step, events), step.epilogue, SimpleNamespace(out=torch.empty(0)), lambda: None)
    inputs = steady._inputs(MAX_BATCH)

    def launch() -> None:
        events.append("graph")
        step.replay()

    read = object()
    steady._shapes[MAX_BATCH] = _Shape(
        inputs=inputs, graph=SimpleNamespace(launch=launch), tables_read=read, logits=step.logits
    )
    batch = _batch({"top_k": 1} if greedy else {})
    batch.req_pool_indices, batch.seq_lens = step.pool_rows, _Lens(step.seq_lens)
    batch.spec_info = SimpleNamespace(bonus_tokens=torch.tensor([4, 5, 6, 7]))
    published: list[Tensor] = []
    result = steady.run(batch, published.append, greedy=greedy)
    assert events == [f"parameters of {MAX_BATCH}", "simulated draw", "graph"]
    assert steady._worker.model_runner.shared_read_done_event is read
    assert inputs.anchors.tolist() == [4, 5, 6, 7]
    assert inputs.seq_lens.tolist() == step.seq_lens.tolist()
    assert inputs.req_pool_indices.tolist() == step.pool_rows.tolist()
    assert result.new_seq_lens is published[0] is step.table.published_seq_lens
    assert result.next_draft_input.bonus_tokens is step.table.published_bonus
    assert (result.new_seq_lens - step.seq_lens).tolist() == result.accept_lens.tolist()
    assert result.next_token_ids.shape == (MAX_BATCH * ROWS,)
    if greedy:
        assert result.accept_lens.tolist() == _sglangs_accept(step, MAX_BATCH)[2].tolist()
    assert int(step.offset) == (0 if greedy else 1)


class Runtime:
    """CUDA's graph calls, as a list of what was asked; ``fails`` is the call that returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails = fails
        self.cudaGraph_t = self.cudaStream_t = lambda value: value

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[int, Any]:
            self.calls.append((name, *arguments))
            return (int(name == self._fails), f"{name} {len(self.calls)}")

        return call


def test_graphs_are_joined_in_order_and_launched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr("sgl_mega_plugin.engine.fold.one_graph.import_module", lambda name: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    one = OneGraph([SimpleNamespace(raw_cuda_graph=lambda index=index: index) for index in (11, 12, 13)])
    one.launch()
    assert runtime.calls == [
        ("cudaGraphCreate", 0),
        ("cudaGraphAddChildGraphNode", "cudaGraphCreate 1", [], 0, 11),
        ("cudaGraphAddChildGraphNode", "cudaGraphCreate 1", ["cudaGraphAddChildGraphNode 2"], 1, 12),
        ("cudaGraphAddChildGraphNode", "cudaGraphCreate 1", ["cudaGraphAddChildGraphNode 3"], 1, 13),
        ("cudaGraphInstantiate", "cudaGraphCreate 1", 0),
        ("cudaGraphLaunch", "cudaGraphInstantiate 5", 7),
    ]


@pytest.mark.parametrize("call", ["cudaGraphCreate", "cudaGraphAddChildGraphNode", "cudaGraphInstantiate"])
def test_a_graph_that_cannot_be_joined_says_which_call_failed(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr("sgl_mega_plugin.engine.fold.one_graph.import_module", lambda name: Runtime(call))
    with pytest.raises(GraphError, match=call):
        OneGraph([SimpleNamespace(raw_cuda_graph=lambda: 1)])


def test_captures_are_kept_only_while_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made)
    with keeping_graphs():
        assert torch.cuda.CUDAGraph().keep_graph is True
        assert torch.cuda.CUDAGraph(keep_graph=False).keep_graph is False
    assert torch.cuda.CUDAGraph is made


# -- where steps keep their host part ----------------------------------------------------------------------------------


class FlashAttentionBackend:
    use_sliding_window_kv_pool, topk = False, 1


class FullCudaGraphBackend:
    pass


@pytest.fixture
def steady_server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A worker whose steps can be steady; the parts that need CUDA at import are made up."""
    attention, graphs = "sglang.srt.layers.attention.flashattention_backend", "sglang.srt.model_executor"
    monkeypatch.setitem(sys.modules, attention, SimpleNamespace(FlashAttentionBackend=FlashAttentionBackend))
    full = SimpleNamespace(FullCudaGraphBackend=FullCudaGraphBackend)
    monkeypatch.setitem(sys.modules, f"{graphs}.runner_backend.full_cuda_graph_backend", full)
    pool = SimpleNamespace(graph_pool_borrow_enabled=lambda: False)
    monkeypatch.setitem(sys.modules, f"{graphs}.runner_utils.pool", pool)
    features = SimpleNamespace(enable_memory_saver=False)
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: SimpleNamespace(features=features))

    def runner() -> SimpleNamespace:
        return SimpleNamespace(
            decode_cuda_graph_runner=SimpleNamespace(
                backend=FullCudaGraphBackend(), attn_backend=FlashAttentionBackend()
            ),
            lora_manager=None,
            hisparse_coordinator=None,
            canary_manager=None,
            model_config=SimpleNamespace(is_multimodal=False),
        )

    return SimpleNamespace(
        worker=SimpleNamespace(
            sample_from_anchor=True,
            draft_model=SimpleNamespace(forward_embed=None),
            model_runner=runner(),
            draft_model_runner=runner(),
        ),
        features=features,
        pool=pool,
    )


def _set(path: str, value: Any) -> Any:
    def change(server: SimpleNamespace) -> None:
        *owners, name = path.split(".")
        owner: Any = server
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, value)

    return pytest.param(change, id=path)


_GRAPHS = "worker.model_runner.decode_cuda_graph_runner"


@pytest.mark.parametrize(
    "change",
    [
        _set("features.enable_memory_saver", True),
        _set("pool.graph_pool_borrow_enabled", lambda: True),
        _set("worker.sample_from_anchor", False),
        _set("worker.draft_model", SimpleNamespace()),
        _set("worker.draft_model_runner.decode_cuda_graph_runner", None),
        _set(f"{_GRAPHS}.backend", object()),
        _set(f"{_GRAPHS}.attn_backend", object()),
        _set(f"{_GRAPHS}.attn_backend.use_sliding_window_kv_pool", True),
        _set(f"{_GRAPHS}.attn_backend.topk", 2),
        _set(f"{_GRAPHS}.enable_two_batch_overlap", True),
        _set("worker.draft_model_runner.lora_manager", object()),
        _set("worker.model_runner.model_config.is_multimodal", True),
    ],
)
def test_where_a_step_keeps_its_host_part_the_reason_is_one(steady_server: SimpleNamespace, change: Any) -> None:
    assert steady_reasons(steady_server.worker) == []
    change(steady_server)
    assert len(steady_reasons(steady_server.worker)) == 1
