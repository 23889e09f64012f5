"""The base class of mechanisms: a configuration, a definition (`weights`) and a sub-quadratic `forward`.

Shape letters: B batch, T tokens, S keys, D model width, H heads, V value channels.
"""

from __future__ import annotations

import importlib
import pkgutil
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar
from typing import Literal as OneOf

import torch
from torch import Tensor, nn

from subquad.attention.divided import check_divided
from subquad.attention.laws import OF_STATES, Law
from subquad.attention.past import IN_PLACE, Draft, InPlace, Literal, Past, Whole, active_drafts
from subquad.attention.refusals import refusal
from subquad.attention.sharing import check_part, check_shared
from subquad.config import Config as BaseConfig
from subquad.config import digest, suggest
from subquad.ops.counting import Cost, cost_of, state_bytes
from subquad.ops.documents import Documents, lay_out
from subquad.ops.padding import Lengths, check_mask, compact, compaction, scatter
from subquad.options import DocWithOptions
from subquad.parallel import Sent, active_group
from subquad.parallel.counted import bytes_sent
from subquad.state import State

Form = OneOf["causal", "bidirectional"]
FILES = frozenset(found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)]))
"""Files of this package, of which one is imported when its mechanism is asked for."""

P = ParamSpec("P")
SelfT = TypeVar("SelfT", bound="Attention")
ConfigT = TypeVar("ConfigT", bound=BaseConfig)


def takes_options(
    config: Callable[P, ConfigT],
) -> Callable[[Callable[[SelfT, ConfigT], None]], Callable[Concatenate[SelfT, P], None]]:
    """Turn a mechanism's `__init__(self, config)` into `__init__(self, *, dim, num_heads, ...)` with all its options.

    Editors and type checkers see the fields of `config`, the mechanism's `Config`, as parameters. The constructor also
    takes a finished configuration instead of options, which `from_config` uses.
    """

    def decorate(init: Callable[[SelfT, ConfigT], None]) -> Callable[Concatenate[SelfT, P], None]:
        def __init__(self: SelfT, *args: P.args, **options: P.kwargs) -> None:  # noqa: N807
            init(self, configuration_of(type(self), args, options))

        found = signature(config)
        own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        __init__.__signature__ = found.replace(parameters=[own, *found.parameters.values()], return_annotation=None)  # type: ignore[attr-defined]
        made = wraps(init)(__init__)
        # Without one of its own, help shows Module's.
        made.__doc__ = "Build the layer from its options, given by name, or from a finished configuration."
        return made

    return decorate


def configuration_of(cls: type[Attention], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the finished configuration in `given`, or the one of `options`; `TypeError` for options by position."""
    if not given:
        return cls.config_of(**options)
    if len(given) == 1 and isinstance(given[0], cls.Config) and not options:
        return given[0]
    by_place = zip((f.name for f in fields(cls.Config)), given, strict=False)
    named = [*((name, value) for name, value in by_place if not isinstance(value, BaseConfig)), *options.items()]
    raise TypeError(
        f"{cls.__name__} takes its options by name, as in "
        f"{cls.__name__}({', '.join(f'{name}={reprlib.repr(value)}' for name, value in named)}), or a finished "
        "configuration alone"
    )


class Attention(nn.Module):
    """Mix tokens: `y = merge(weights(x) @ values(x))`, computed without forming the weights.

    A causal mechanism may be cut anywhere: `layer(x)` equals `layer(x[:, :n])` followed by `layer(x[:, n:], state)`.
    """

    name: ClassVar[str]
    """Name in the registry; the file has the same name."""
    summary: ClassVar[str]
    """What a token sees, in one line for tables."""
    paper: ClassVar[str]
    """Author, year, arXiv number and section."""
    cost_order: ClassVar[OneOf["linear", "T log T", "quadratic"]] = "linear"
    """Growth of the cost with T."""
    state_grows: ClassVar[bool] = False
    """Whether the state keeps growing with the tokens read."""
    forms: ClassVar[tuple[Form, ...]] = ("causal",)
    """Forms that the option `causal` can choose."""
    rotates: ClassVar[bool] = False
    """Whether queries and keys can carry rotary positions (the option `rope`)."""
    sees_order: ClassVar[bool] = False
    """Whether its output depends on the order of tokens without position encodings, by decays, gates or the like."""
    exempt_options: ClassVar[dict[str, Any]] = {}
    """Options of a form that breaks laws which the default keeps; `exemptions` names the laws and the reasons."""
    softmax_reach: ClassVar[str | None] = None
    """Name of the option that bounds how many tokens a query sees by softmax; None if nothing bounds it."""
    branches: ClassVar[tuple[str, ...]] = ()
    """Names of the branches that can be closed (`Branched`)."""
    has_position_terms: ClassVar[bool] = False
    """Whether its logits have terms that depend on positions alone (`position_terms`)."""
    takes_handed: ClassVar[bool] = False
    """Whether it reads and returns the entry `handed` of the state, which goes from layer to layer."""
    weight_map: ClassVar[dict[str, str]] = {}
    """Projections that replacing full attention copies: the name here, and the name there."""
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    has_static_cache: ClassVar[bool] = False
    """Whether decoding in place keeps keys and values in tensors of constant shape that are written in place."""
    config: Any
    causal: bool
    """Whether a token sees only itself and earlier tokens."""
    is_distribution: bool = True
    """Whether each row of the weights sums to one."""

    registry: ClassVar[dict[str, type[Attention]]] = {}

    @dataclass(frozen=True, kw_only=True)
    class Config(BaseConfig):
        """Options of the mechanism."""

        dim: int
        """Model width D."""
        num_heads: int
        """Heads H, which divide the model width equally."""
        causal: bool = True
        """Whether a token sees only itself and earlier tokens; False is the bidirectional form."""
        bias: bool = False
        """Whether the projections have a bias."""
        dropout: float = 0.0
        """Dropout on the mechanism's weights, in training."""

        def check_heads(self) -> None:
            """Raise `ValueError` if the model width isn't a multiple of the heads."""
            if self.dim < 1 or self.num_heads < 1 or self.dim % self.num_heads:
                raise ValueError(
                    f"dim must be a positive multiple of num_heads, got dim={self.dim}, num_heads={self.num_heads}"
                )

        def __post_init__(self) -> None:
            self.check_heads()
            if not 0 <= self.dropout < 1:
                raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            return  # a shared base, not a mechanism
        file = cls.__module__.rpartition(".")[2]
        if cls.name != file and file != "__main__":  # a script or a notebook may define a mechanism too
            raise TypeError(f"{cls.__name__}.name is {cls.name!r} but its file is {file}.py; use one name for both")
        if cls.__module__ != f"{__package__}.{cls.name}":
            _import(cls.name)
        there = Attention.registry.get(cls.name)
        if there is not None and there.__module__ != cls.__module__:
            raise TypeError(
                f"attention {cls.name!r} is already {there.__module__}.{there.__name__}; "
                f"give {cls.__module__}.{cls.__name__} another name"
            )
        Attention.registry[cls.name] = cls
        cls.__doc__ = DocWithOptions(cls.__doc__)  # type: ignore[assignment]  # a class has what __get__ returns

    def __init__(self, config: Config) -> None:
        super().__init__()
        form = "causal" if config.causal else "bidirectional"
        if form not in self.forms:
            raise ValueError(f"attention {self.name!r} has no {form} form; it has: {', '.join(self.forms)}")
        self.config = config
        self.causal = config.causal
        self.config_hash = digest({"name": self.name, **config.to_dict()})

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Build the mechanism from a finished configuration."""
        return cls(config)

    @classmethod
    def config_of(cls, **options: Any) -> Any:
        """Return the configuration with these options; raise `ValueError` or `TypeError` that names the valid ones."""
        cls.check_names(options)
        return cls.Config.from_dict(options)

    @classmethod
    def option_names(cls) -> set[str]:
        """Return the names of all options, including `dim` and `num_heads`."""
        return {f.name for f in fields(cls.Config)}

    @classmethod
    def check_names(cls, options: Iterable[str], *, given: Iterable[str] = ()) -> None:
        """Raise `ValueError` for a name that isn't an option, naming the valid ones.

        Options in `given` are set by the caller and can't be chosen.
        """
        known = cls.option_names() - set(given)
        for option in options:
            if option not in known:
                raise ValueError(f"attention {cls.name!r} has no option {option!r}; {suggest(option, known)}")

    @classmethod
    def options_after_full(cls, *, rotary: bool) -> dict[str, Any]:
        """Return the options for replacing trained full attention; `rotary` says whether its queries are rotated."""
        return {}

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | Lengths | None = None,
        doc_ids: Tensor | Documents | None = None,
    ) -> tuple[Tensor, State]:
        """Return the mixed tokens `[B, T, D]` and the new state; `x` continues the tokens that made `state`.

        `mask` is a bool `[B, T]`, True for a real token. Padding may stand anywhere: it changes no real token, and its
        outputs are zero. A bidirectional layer reads whole sequences: it takes no state, and its returned state only
        counts tokens. `doc_ids`, integers `[B, T]` (-1: padding), pack documents into rows: a new document begins where
        the id changes, takes no state, and has the outputs that it would have alone; the returned state is that of the
        last document in each row. A model, which lays out its rows once for all layers, gives `Lengths` as `mask` or
        `Documents` as `doc_ids`. Raises `TypeError` for arguments that are not tensors or states, and `ValueError`
        for a wrong shape and for a state of another configuration or batch.
        """
        begun = isinstance(state, State) and "seen" in state.entries  # it may hold only what is handed on
        fits = isinstance(x_BTD, Tensor) and x_BTD.ndim == 3 and x_BTD.shape[-1] == self.config.dim
        if fits and state is not None:
            fits = isinstance(state, State) and (self.causal if begun else self.takes_handed)
            fits = fits and state.config_hash == self.config_hash and state.batch in (None, x_BTD.shape[0])
        if not fits:
            raise refusal(self, x_BTD, state)
        if not begun:  # the parameters were checked in the call that made the state
            check_divided(self)
        if doc_ids is not None and active_group() is not None:
            check_part(self, state if begun else None, mask, doc_ids)
        if doc_ids is not None:
            check_fresh(state if begun else None)
            if not isinstance(doc_ids, Documents):
                doc_ids = lay_out(doc_ids, mask, *x_BTD.shape[:2])  # type: ignore[arg-type]
            return self.mix_documents(x_BTD, doc_ids, state)
        if mask is None or isinstance(mask, Lengths):
            return self.mix_tokens(x_BTD, state, None if mask is None else mask.lengths_B)
        check_mask(mask, *x_BTD.shape[:2])
        moved = compaction(mask)
        y_BTD, state = self.mix_tokens(compact(x_BTD, moved), state, moved.lengths_B)
        return scatter(y_BTD, moved), state

    if TYPE_CHECKING:
        __call__ = forward

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Return the heads' outputs `[B, H, T, V]`: the mechanism, as a function of its tokens and of those before."""
        raise NotImplementedError(f"{type(self).__name__} must define mix (Attention is abstract)")

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Map the heads' outputs to the model width; where there is a gate, it is computed from the inputs `x`."""
        return self.out(join(y_BHTV))

    def outputs(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Return the mixed tokens `[B, T, D]`: `finish` of `mix`."""
        return self.finish(self.mix(x_BTD, past), x_BTD)

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Compute `forward` for rows whose first `lengths_B` tokens are real (None: all T), as in `Lengths`."""
        past: Past
        if not self.causal:
            past = Whole(x_BTD, state, lengths_B)
        elif state is not None and IN_PLACE in state.entries:
            past = InPlace(x_BTD, state, lengths_B)
        elif (drafts := active_drafts()) is not None:
            past = Draft(x_BTD, state, lengths_B)
            drafts.append(past)
        else:
            past = Past(x_BTD, state, lengths_B)
        if past.group is not None:
            check_part(self, past.given, lengths_B, None)
        y_BTD = self.outputs(x_BTD, past)
        # Not in a `finally`: gradient checkpointing leaves a recomputation early.
        if past.unread:
            raise RuntimeError(f"{self.name} keeps {', '.join(past.unread)} and does not read it")
        return y_BTD, State(past.entries, self.config_hash)

    def mix_documents(self, x_BTD: Tensor, documents: Documents, state: State | None) -> tuple[Tensor, State]:
        """Mix each document as a sequence of its own; return the state of the first group's documents.

        `state` holds only what is handed on, by row: the same for all documents of a row.
        """
        found = []
        for group in documents.groups:
            own = None if state is None else state.map(partial(rows_of, group.rows_R))
            found.append(self.mix_tokens(documents.take(x_BTD, group), own, group.lengths_R))
        return documents.put([y_RCD for y_RCD, _ in found]), found[0][1]

    def weights(self, x_BTD: Tensor, mask: Tensor | None = None, doc_ids: Tensor | None = None) -> Tensor:
        """Return the weights `[B, H, T, T]` that define the mechanism. Quadratic: for tests and pictures."""
        if mask is None and doc_ids is None:
            return self.dense_weights(x_BTD)
        B, T = x_BTD.shape[:2]
        w_BHTS = x_BTD.new_zeros(B, self.dense_weights(x_BTD[:1, :0]).shape[1], T, T)
        for b, real in sequences(mask, doc_ids, B, T):
            w_BHTS[b, :, real[:, None], real] = self.dense_weights(x_BTD[b : b + 1, real])[0]
        return w_BHTS

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return the weights of sequences without padding: the output of the mechanism with the identity as values."""
        return self.mix(x_BTD, Literal(x_BTD, causal=self.causal, eye=True))

    def definition(self, x_BTD: Tensor) -> Tensor:
        """Return the outputs that `forward` must equal, computed with dense weights. Quadratic."""
        return self.outputs(x_BTD, Literal(x_BTD, causal=self.causal))

    @property
    def divisible(self) -> tuple[int, ...]:
        """Numbers of heads that torch's tensor parallelism may divide; none where the heads differ."""
        return ()

    @property
    def dropout_p(self) -> float:
        """Probability of dropout on the weights: 0 in evaluation mode."""
        return self.config.dropout if self.training else 0.0

    def exemptions(self) -> dict[Law, str]:
        """Return the laws of the contract that don't apply to this layer, each with its reason."""
        if self.causal:
            return {}
        whole = "bidirectional: reads whole sequences and keeps no state"
        return dict.fromkeys(OF_STATES, whole) | {Law.NO_FUTURE: "bidirectional: a token sees later ones"}

    def warn_on_length(self, tokens: int) -> None:
        """Log a warning if `tokens` tokens are more than the layer is made for; most layers have no limit."""

    def set_layer_index(self, layer: int, layers: int) -> None:
        """Tell the layer its number in a new model, `layer` (from 0) of `layers`; most layers ignore it.

        It may make parameters: call it before the optimizer is made.
        """

    def after_step(self, step: int) -> None:
        """Do what the mechanism needs after optimizer step number `step` (from 1), called by `after_step`."""

    def cost(self, tokens: int) -> Cost:
        """Return this layer's cost for one sequence of `tokens` tokens, counted in a run without data."""
        return cost_of(self, tokens, self._alone, partial(self._tokens, tokens))

    def state_bytes(self, tokens: int) -> int:
        """Return the bytes of the float32 state after one sequence of `tokens` tokens."""
        return state_bytes(self, self._alone, partial(self._tokens, tokens))

    def communication(self, tokens: int, ranks: int, of: Sequence[int] | None = None) -> tuple[Sent, ...]:
        """Return the bytes that each of `ranks` processes sends for one sequence of `tokens` tokens, in float32.

        They are counted in runs without data, one for each rank in `of` (None: all). Gradients are sent in the backward
        pass. Raises `ValueError` if the tokens aren't a multiple of the ranks, for a rank in `of` that isn't one of
        them, and for a layer that can't be shared.
        """
        if ranks < 1 or tokens < 0 or tokens % ranks:
            raise ValueError(
                f"the ranks share a sequence equally: tokens must be a multiple of ranks, got {tokens} and {ranks}"
            )
        if of is not None and not all(0 <= rank < ranks for rank in of):
            raise ValueError(f"the ranks in of must be from 0 to {ranks - 1}, got {list(of)}")
        check_shared(self)
        return tuple(bytes_sent(self, self._alone, partial(self._tokens, tokens // ranks), ranks, of))

    def _alone(self, x_BTD: Tensor) -> tuple[Tensor, State]:
        return self(x_BTD)

    def _tokens(self, tokens: int) -> Tensor:
        return torch.empty(1, tokens, self.config.dim, requires_grad=True)

    def adopt(self, handed: Tensor | None) -> Tensor | None:
        """Store `handed` for `weights`, and return the value for the next layer; most layers return it unchanged."""
        return handed

    def position_terms(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the terms `p1` and `p2`, each `[H, T]`, that key and query positions add to the logits.

        Raises `ValueError` if the mechanism has no such terms.
        """
        having = [name for name in names() if mechanism(name).has_position_terms]
        raise ValueError(
            f"attention {self.name!r} has no position terms of its own; mechanisms that have: {', '.join(having)}"
        )


def split(width: int, *x_BTC: Tensor) -> list[Tensor]:
    """Reshape each `[B, T, C]` to `[B, C / width, T, width]`, heads of `width` channels."""
    return [x.unflatten(-1, (-1, width)).transpose(1, 2) for x in x_BTC]


def join(y_BHTV: Tensor) -> Tensor:
    """Reshape `[B, H, T, V]` to `[B, T, H * V]`."""
    return y_BHTV.transpose(1, 2).flatten(2)


def check_fresh(state: State | None) -> None:
    """Raise `ValueError` for a state: packed documents begin without one."""
    if state is not None:
        raise ValueError("doc_ids begin new documents, and these have no state before them: leave state or doc_ids out")


def rows_of(rows_R: Tensor, x_B: Tensor) -> Tensor:
    """Return the rows `[R, ...]` of `[B, ...]`; rows that share memory still share it."""
    return x_B[:1].expand(len(rows_R), *x_B.shape[1:]) if x_B.stride(0) == 0 else x_B[rows_R]


def sequences(mask: Tensor | None, doc_ids: Tensor | None, batch: int, tokens: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the row and the token indices of each sequence in rows `[batch, tokens]`."""
    if doc_ids is None:
        assert mask is not None
        check_mask(mask, batch, tokens)
        doc_ids, mask = mask.long() - 1, None
    for group in lay_out(doc_ids, mask, batch, tokens).groups:
        for row, places_C in zip(group.rows_R.tolist(), group.places_RC, strict=True):
            yield row, places_C[places_C < batch * tokens] - row * tokens


def after_step(model: nn.Module, step: int) -> None:
    """Tell all mechanisms in `model` that the optimizer has taken step number `step` (from 1): Performer redraws.

    Processes without DistributedDataParallel, which copies buffers, need the same state of torch's generator.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.after_step(step)


def names() -> list[str]:
    """Return the names of all mechanisms, sorted: those of this package and those that a program has defined."""
    for file in FILES:
        _import(file)
    return sorted(Attention.registry)


def mechanism(name: str) -> type[Attention]:
    """Return the class registered as `name`; raise `ValueError` that lists the valid names."""
    _import(name)
    if name not in Attention.registry:
        raise ValueError(f"unknown attention {name!r}; {suggest(name, names())}")
    return Attention.registry[name]


def _import(name: str) -> None:
    """Import the file of this package for the mechanism `name`, if there is one, which registers the mechanism."""
    if name in FILES:
        importlib.import_module(f"{__package__}.{name}")


def build(name: str, *, dim: int, num_heads: int, **options: Any) -> Attention:
    """Build the mechanism `name` from its options; an unknown name or option raises an error with the valid ones."""
    cls = mechanism(name)
    return cls.from_config(cls.config_of(dim=dim, num_heads=num_heads, **options))
