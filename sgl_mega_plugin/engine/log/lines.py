"""The lines that SGLang 0.5.23 prints for its switches, as data: by slot, with file and meaning.

``text`` is the message as the file has it, printf fields included, so that a log record is recognized by its format and
a log file by a pattern made from it. ``tests/engine/test_engine_log.py`` compares every text with
SGLang's source, and fails where one of those files has a line that neither this table nor the test knows.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import cached_property

from sgl_mega_plugin.contract.slot import Record

_DSPARK = "srt/speculative/dspark_components"
_RUNNER = "srt/model_executor/runner"


class Says(StrEnum):
    """What a line tells of its switch."""

    TAKEN = "taken"
    DECLINED = "declined"


class Moment(StrEnum):
    """When SGLang prints a line, if it does."""

    START = "while the server starts"
    STEP = "at the first step that uses it"
    SAMPLED = "at the first step with a sampled request that uses it"
    SAMPLED_TWICE = "at the second step whose requests are all sampled"
    SIMULATED = "at the first step under simulated acceptance"


class Line(Record):
    """One message of SGLang about one switch."""

    slot: str
    says: Says
    moment: Moment
    file: str  # below the package ``sglang``
    level: str  # of the log call: "info", "warning"
    text: str
    means: str
    also_by: str | None = None  # a slot of ours that makes SGLang print the same line

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the message in a line of a log file, whatever stands before it."""
        fields = {"%d": r"\d+", "%s": r".+"}
        return re.compile("".join(fields.get(part, re.escape(part)) for part in re.split(r"(%[ds])", self.text)))


def _taken(
    slot: str, file: str, text: str, means: str, moment: Moment = Moment.START, also_by: str | None = None
) -> Line:
    return Line(
        slot=slot, says=Says.TAKEN, moment=moment, file=file, level="info", text=text, means=means, also_by=also_by
    )


def _declined(slot: str, file: str, text: str, means: str, *, level: str, moment: Moment = Moment.START) -> Line:
    return Line(slot=slot, says=Says.DECLINED, moment=moment, file=file, level=level, text=text, means=means)


LINES: tuple[Line, ...] = (
    _taken(
        "draft_prep_fork",
        f"{_RUNNER}/decode_cuda_graph_runner.py",
        "SGLANG_OPT_DSV41_DSPARK_DRAFT_PREP_FORK: draft in-graph metadata prep forked onto a side stream.",
        "the draft's graphs prepare their attention metadata on a second stream",
    ),
    _taken(
        "fused_accept_tail",
        f"{_DSPARK}/dspark_verify.py",
        "DSpark verify graph bs=%d: fused accept tail (bonus=%s, tp-broadcast=%s)",
        "the verify graph of this batch size accepts and keeps its books in one kernel",
    ),
    _declined(
        "fused_accept_tail",
        f"{_DSPARK}/dspark_verify.py",
        "DSpark fused accept tail off: the accept-site TP broadcast is selected without SGLANG_DSPARK_SIMULATE_FOLD.",
        "SGLANG_SPEC_TP_SYNC has ranks agree on the accept in the graph, which the one kernel cannot do",
        level="info",
    ),
    _taken(
        "engine_blockwise_rejection",
        f"{_DSPARK}/dspark_verify.py",
        "DSpark: sampled verify accepts use block-wise rejection",
        "sampled steps without top-k and top-p are accepted from per-block maxima and sums",
        Moment.SAMPLED,
    ),
    _taken(
        "sampling_accept_graph",
        f"{_DSPARK}/dspark_sampling_accept_graph.py",
        "Captured the DSpark sampling-accept region for %s.",
        "accept and commits of an all-sampled step are a graph of this batch size",
        Moment.SAMPLED_TWICE,
    ),
    _declined(
        "sampling_accept_graph",
        f"{_DSPARK}/dspark_sampling_accept_graph.py",
        "DSpark sampling-accept graph capture failed for %s; sampling steps take the eager accept from now on.",
        "the capture raised; the traceback follows in the log",
        level="warning",
        moment=Moment.SAMPLED_TWICE,
    ),
    _taken(
        "mid_fold",
        f"{_DSPARK}/dspark_worker_v2.py",
        "Verify ids read from the draft graph output (first step).",
        "the draft's graph wrote the verify ids",
        Moment.STEP,
    ),
    _taken(
        "post_fold",
        f"{_DSPARK}/dspark_worker_v2.py",
        "Seq lens and bonus relayed by the verify graph (first step).",
        "the verify graph wrote lengths and bonus tokens where the next step reads them",
        Moment.STEP,
        also_by="relay",
    ),
    _taken(
        "target_verify_metadata_glue",
        f"{_RUNNER}/decode_cuda_graph_runner.py",
        "Target verify metadata prep through the glue graph, one per key.",
        "the target's attention metadata is prepared by a graph",
    ),
    _declined(
        "target_verify_metadata_glue",
        f"{_RUNNER}/decode_cuda_graph_runner.py",
        "Target verify metadata glue graph off: %s.",
        "the attention backend prepares metadata with the host's help, for the reason given",
        level="info",
    ),
    _taken(
        "target_metadata_early",
        f"{_RUNNER}/decode_cuda_graph_runner.py",
        "Target verify metadata staged on a side stream beside the draft graph for variants %s.",
        "the target's attention metadata is prepared while the draft's graph runs",
    ),
    _taken(
        "skip_prefilled_inputs",
        f"{_RUNNER}/decode_cuda_graph_runner.py",
        "Pre-planned verify replay skipped its input_ids / positions re-copy (first step).",
        "a verify replay kept the inputs that its plan had copied",
        Moment.STEP,
    ),
    _taken(
        "defer_context_kv",
        f"{_DSPARK}/dspark_worker_v2.py",
        "SGLANG_DSPARK_DEFER_CONTEXT_KV: the draft context-KV commit runs at the head of the next draft graph, "
        "joined at its first KV store.",
        "the draft's context KV is written by the next draft graph",
    ),
    _declined(
        "defer_context_kv",
        f"{_DSPARK}/dspark_worker_v2.py",
        "SGLANG_DSPARK_DEFER_CONTEXT_KV refused, the commit stays in the verify graph: %s",
        "the commit stays where it was, for the reason given",
        level="warning",
    ),
    _taken(
        "sim_draw_ahead",
        f"{_DSPARK}/dspark_worker_v2.py",
        "Simulated acceptance drawn ahead of the draft launch (first step).",
        "the simulated accepted length was drawn before the draft ran",
        Moment.SIMULATED,
    ),
)


class Silence(Record):
    """A switch that SGLang prints nothing about, and where its code reads it."""

    slot: str
    file: str  # below the package ``sglang``
    acts: str  # on what, as that code has it


SILENT: tuple[Silence, ...] = (
    Silence(
        slot="prepare_inputs_once",
        file=f"{_DSPARK}/dspark_worker_v2.py",
        acts="on every DSpark worker that has the draft",
    ),
    Silence(
        slot="skip_glued_replay_view",
        file=f"{_RUNNER}/decode_cuda_graph_runner.py",
        acts="on replays whose metadata a glue graph prepares",
    ),
    Silence(
        slot="cuda_graph_fill_fast_path",
        file="srt/model_executor/cuda_graph_buffer_registry.py",
        acts="on the input buffers of every CUDA graph",
    ),
    Silence(
        slot="one_launch_commit_stage",
        file=f"{_DSPARK}/dspark_deferred_commit.py",
        acts="where slot 'defer_context_kv' is taken",
    ),
    Silence(
        slot="post_forward_cuda_graph",
        file=f"{_DSPARK}/dspark_verify.py",
        acts="where SGLang has an epilogue of its own",
    ),
    Silence(
        slot="mxfp4_deferred_finalized_shape",
        file="srt/layers/quantization/mxfp4_flashinfer_trtllm_moe.py",
        acts="on MXFP4 experts of FlashInfer's TRT-LLM kernels",
    ),
)

#: The message that SGLang starts a server's accepted flag with; what stands before it belongs to an earlier start.
ACCEPTED = "--enable-nvidia-megakernel: sgl-mega-plugin target on "


class Mark(Record):
    """The start of a message that says where a server is."""

    file: str  # below the package ``sglang``
    text: str

    @property
    def logger(self) -> str:
        """The logger that the file logs to."""
        return "sglang." + self.file.removesuffix(".py").replace("/", ".")


#: What ends a scheduler's own start: graphs are captured, and no step has run.
STARTED = Mark(file="srt/managers/scheduler.py", text="max_total_num_tokens=")


def lines_of(slot: str) -> tuple[Line, ...]:
    return tuple(line for line in LINES if line.slot == slot)


def silence_of(slot: str) -> Silence | None:
    return next((entry for entry in SILENT if entry.slot == slot), None)
