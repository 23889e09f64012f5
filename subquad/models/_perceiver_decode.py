"""Decoding with Perceiver AR: latents are added while there is room, then the window is cut anew.

Shape letters: B batch, T tokens, W window, S keys, M latents, D width, H heads, K channels.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from subquad.models._perceiver import Number, Parts, Window, attend, neighbours, rest, to_the_end
from subquad.models.perceiver_options import Decode
from subquad.ops.padding import Compaction, real_slots, scatter
from subquad.ops.patterns import Causal
from subquad.state import State, advance

if TYPE_CHECKING:
    from subquad.models.perceiver import PerceiverAR

MODES = get_args(Decode)


def go_on(model: PerceiverAR, tokens_BT: Tensor, state: State, moved: Compaction | None) -> tuple[Tensor, State]:
    """The vectors `[B, T, D]` of more tokens, each as if it came alone, and the state after them."""
    lengths_B = None
    if moved is not None:
        lengths_B = moved.lengths_B
        tokens_BT = tokens_BT.gather(1, moved.order_BT).masked_fill(~real_slots(lengths_B, tokens_BT.shape[1]), 0)
    outputs = [model.embedding(tokens_BT[:, :0])]
    done = 0
    while done < tokens_BT.shape[1]:
        room = _room(model, state)
        part_BT = tokens_BT[:, done : done + max(1, room)]
        new_B = None if lengths_B is None else (lengths_B - done).clamp(0, part_BT.shape[1])
        h_BTD, state = (_grow if room else _restart)(model, part_BT, state, new_B)
        outputs.append(h_BTD)
        done += part_BT.shape[1]
    h_BTD = torch.cat(outputs, 1)
    return (h_BTD if moved is None else scatter(h_BTD, moved)), state


def read(model: PerceiverAR, tokens_BT: Tensor, state: State | None) -> State:
    """The state after more tokens; where every token is a pass of its own, without any."""
    seen, start = (0, 0) if state is None else (state.seen, first_latent(state))
    after = seen + tokens_BT.shape[1]
    used = after - start
    alone = isinstance(used, int) and used >= model.latents and model.options.decode == "exact"
    if alone and isinstance(after, int):
        tokens_BW = tokens_BT if state is None else _last_tokens(model, tokens_BT, state, None)
        return model.state(Window.of(tokens_BW, None, model.limit).tokens_BW, after, after - model.latents, {})
    if state is not None:
        return model.hidden(tokens_BT, state)[1]
    return model.hidden(tokens_BT, latents=model.options.prompt_latents)[1]


def latents_left(model: PerceiverAR, prompt: int, state: State | None) -> int | None:
    """How many tokens can follow a prompt of so many after `state`; None: any number."""
    options = model.options
    if options.decode != "frozen":
        return None
    if state is None:
        return model.latents - min(options.kept, prompt - 1)
    used = state.seen - first_latent(state)
    return max(0, model.latents - prompt + 1 - (used if isinstance(used, int) else int(used.max())))


def mode(model: PerceiverAR) -> dict[str, int]:
    """How the model decodes, as entries of a state."""
    options = model.options
    return {"decode": MODES.index(options.decode), "refill": 0 if options.decode == "exact" else options.kept}


def check_mode(model: PerceiverAR, state: State) -> None:
    """Raise `ValueError` for a state that was made in another mode: what it holds depends on it."""
    now = mode(model)
    made: dict[str, Any] = {name: state[name] for name in now}
    if made != now:
        raise ValueError(
            f"the state was made with {_named(made)} and the model has {_named(now)}; choose the former by set_decode, "
            "or read the tokens anew"
        )


def trim(model: PerceiverAR, state: State) -> State:
    """A row of a joined batch without the places that longer rows needed, which hold nothing of its own."""
    seen, start = int(state.seen), int(first_latent(state))
    entries = {**state.entries, "tokens": state.tensor("tokens")[:, -seen:]}
    for i in range(len(model.layers)):
        if f"layers.{i}" in state:
            kept, count = state.child(f"layers.{i}"), int(model.history_keys(i, start)) + seen - start
            entries[f"layers.{i}"] = kept.map(partial(_last_places, count=count))
    return State(entries, state.config_hash)


def _last_places(x_1HSK: Tensor, count: int) -> Tensor:
    return x_1HSK[:, :, x_1HSK.shape[2] - count :]


def _named(mode: dict[str, int]) -> str:
    with_refill = f" and refill={mode['refill']}" if mode["refill"] else ""
    return f"decode={MODES[mode['decode']]}{with_refill}"


def first_latent(state: State) -> Number:
    """Position of the first latent."""
    start = state["start"]
    assert not isinstance(start, State)
    return start


def _room(model: PerceiverAR, state: State) -> int:
    """How many latents every row can still add to what is kept."""
    if "layers.0" not in state:
        return 0
    used = state.seen - first_latent(state)
    return model.latents - (used if isinstance(used, int) else int(used.max()))


def _grow(model: PerceiverAR, tokens_BT: Tensor, state: State, new_B: Tensor | None) -> tuple[Tensor, State]:
    """More latents after those whose keys and values are kept; row b has `new_B[b]` of them (None: T)."""
    seen, start = state.seen, first_latent(state)
    x_BTD = model.embedding(tokens_BT, seen, new_B)
    layers: dict[str, State] = {}
    for i in range(len(model.layers)):
        block, mixer = model.block(i)
        kept = state.child(f"layers.{i}")
        z_BTD = block.attention_norm(x_BTD)
        k_BHSK, v_BHSK = mixer.keys(z_BTD, seen), mixer.kv_values(z_BTD)
        k_BHSK = torch.cat([kept.tensor("keys").to(k_BHSK.dtype), k_BHSK], 2)
        v_BHSK = torch.cat([kept.tensor("values").to(v_BHSK.dtype), v_BHSK], 2)
        slots = k_BHSK.shape[2] - tokens_BT.shape[1]
        count = model.history_keys(i, start) + seen - start
        y_BTD = attend(mixer, mixer.queries(z_BTD, seen), k_BHSK, v_BHSK, Causal(), count, count - slots)
        x_BTD = rest(block, x_BTD, y_BTD)
        if new_B is not None:
            k_BHSK, v_BHSK = to_the_end(k_BHSK, 2, slots + new_B), to_the_end(v_BHSK, 2, slots + new_B)
        layers[f"layers.{i}"] = State({"keys": k_BHSK, "values": v_BHSK}, model.config_hash)
    after = advance(seen, tokens_BT.shape[1], new_B)
    return model.norm(x_BTD), model.state(_last_tokens(model, tokens_BT, state, new_B), after, start, layers)


def _restart(model: PerceiverAR, token_B1: Tensor, state: State, new_B: Tensor | None) -> tuple[Tensor, State]:
    """One more token, in a pass where the rows that have used all their latents begin with another one."""
    options, seen, start = model.options, state.seen, first_latent(state)
    after = advance(seen, 1, new_B)
    full = torch.as_tensor(seen - start >= model.latents, device=token_B1.device)
    if new_B is not None:
        full = full & (new_B > 0)
    if options.decode == "frozen" and bool(full.any()):
        raise ValueError(
            f"decode='frozen' has used all {model.latents} latents after the history of the prompt; generate fewer "
            "tokens, give the prompt fewer latents (refill), or choose decode exact or refill"
        )
    first = after - (model.latents if options.decode == "exact" else options.kept)
    window = Window.from_last(_last_tokens(model, token_B1, state, new_B), after)
    if isinstance(first, int) and isinstance(after, int):
        # A row of a batch that began anew may have latents left.
        first = first if bool(full) else start
        assert isinstance(first, int)
        used = after - first
        parts = Parts(first, used, model.capped(window.tokens_BW.shape[1] - used))
    else:
        start = torch.where(full, first, start)
        parts = Parts(start, int((after - start).max()), model.capped(int(start.max())))
    h_BMD, state = model.restart(window, parts)
    newest = torch.as_tensor(after - parts.start - 1, device=h_BMD.device)
    return neighbours(h_BMD, newest.expand(h_BMD.shape[0]), 1), state


def _last_tokens(model: PerceiverAR, tokens_BT: Tensor, state: State, new_B: Tensor | None) -> Tensor:
    """The tokens in reach, each row's last one in the last slot."""
    old_BW = state.tensor("tokens")
    tokens_BW = torch.cat([old_BW, tokens_BT.to(old_BW.dtype)], 1)
    if new_B is not None:
        tokens_BW = to_the_end(tokens_BW, 1, old_BW.shape[1] + new_B)
    return tokens_BW if model.limit is None else tokens_BW[:, -model.limit :]
