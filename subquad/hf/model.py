"""The decoder with its head as a transformers model: training with `Trainer`, `generate`, `from_pretrained`.

Shape letters: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from subquad.hf.backbone import (
    SubquadModel,
    checked_cache,
    given_inputs,
    packed_documents,
    padding_mask,
)
from subquad.hf.cache import SubquadCache
from subquad.hf.config import SubquadConfig
from subquad.hf.loading import StrictModel
from subquad.layers.criterion import IGNORED, CrossEntropy, Reduction
from subquad.layers.head import Lookup, is_tied, logits_of
from subquad.models.build import build_model
from subquad.models.decoder import Decoder, next_tokens
from subquad.parallel import active_group


class SubquadForCausalLM(StrictModel, GenerationMixin):
    """A causal language model: a `SubquadModel`, its attribute `model`, and the head `lm_head`, tied or not.

    With a look-up over the logits the module `lookup` follows the head.
    """

    config: SubquadConfig
    config_class = SubquadConfig
    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.decoder.embedding.tokens.weight"}  # noqa: RUF012
    lm_head: nn.Module
    lookup: Lookup | None

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        whole = build_model(config.decoder_config())
        self.model = SubquadModel(config, whole.with_head(None, None))
        self.register_module("lm_head", whole.head)
        self.register_module("lookup", whole.lookup)
        self.criterion = CrossEntropy()
        # The Trainer would count labels of whole sequences, but those before the latents are not in the loss.
        self.accepts_loss_kwargs = whole.predicts_last is None
        self.post_init()

    @classmethod
    def around(cls, decoder: Decoder, **kwargs: Any) -> Self:
        """Return a decoder, not a copy, as a transformers model; `kwargs` are fields of its configuration."""
        with torch.device("meta"):  # no memory for weights that are replaced at once
            model = cls(SubquadConfig.from_decoder(decoder.config, **kwargs))
        model.model.decoder = decoder.with_head(None, None)
        model.register_module("lm_head", decoder.head)
        model.register_module("lookup", decoder.lookup)
        return model

    @property
    def decoder(self) -> Decoder:
        """The same model as a `subquad.models.Decoder`: its modules are shared, not copied.

        Each access makes a new decoder, in the model's present mode (training or not, gradient checkpointing).
        """
        decoder: Decoder = self.model.decoder
        return decoder.with_head(self.lm_head, self.lookup)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SubquadCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool = True,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        doc_ids: Tensor | None = None,
        latents: int | None = None,
        **packed: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits of the next token `[B, T, V]` and, with `labels`, the loss in nats; the rest as `SubquadModel`.

        `labels` `[B, T]` are the tokens themselves, as everywhere in transformers: they are shifted here, and -100 and
        padding do not count. The loss is the mean over the labels that count or, if the Trainer gives
        `num_items_in_batch`, their sum divided by it; labels at padding, which that number includes, must then be -100,
        and a row that begins with padding still counts one label that no real token predicts. `logits_to_keep` keeps
        that many last logits (0: all), or those at the indices in an integer tensor `[N]`. `return_logits=False` leaves
        the logits out: the loss alone never holds those of all tokens.

        Within `subquad.parallel.context_parallel(group)` logits are those of this process's part, and the loss is
        scaled so that its mean over processes is that of one process: average the gradients, as
        DistributedDataParallel does.

        A `PerceiverAR` predicts only with its latents: logits are `[B, min(m, T), V]`. Without cached tokens the loss
        has a pass of its own, over all but each row's last token, so that each of the m latents has a label; logits and
        a cache take a second pass. `generate` follows the option `decode` or `model.decoder.set_decode`; with
        `use_cache=False` each token is a whole pass, as with `decode=exact`.
        """
        given = given_inputs(input_ids, inputs_embeds)
        if labels is not None and labels.shape != given.shape[:2]:
            raise ValueError(
                f"labels must have the shape of the tokens, {list(given.shape[:2])}, got {list(labels.shape)}"
            )
        if active_group() is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError(
                "logits_to_keep counts the outputs of a whole sequence, but each process has only a part: leave it out"
            )
        cache = checked_cache(past_key_values)
        doc_ids = packed_documents(doc_ids, position_ids, attention_mask, given, packed)
        mask_BT = padding_mask(attention_mask, given)
        cached = cache is not None or bool(use_cache)
        if labels is not None and self.training and self.config.loop_loss == "all" and cached:
            raise ValueError("loop_loss='all' trains on every pass, which a cache does not give: set use_cache=False")
        loss, logits_BTV = None, None
        apart = labels is not None and self.model.decoder.predicts_last is not None
        if labels is not None and apart and (cache is None or cache.state is None):
            # A row's last token is only a label, so that every latent has one: the loss has a pass of its own.
            read_BT = None if mask_BT is None else (next_tokens(given, mask_BT) != IGNORED)[:, :-1]
            found = self.model(given[..., :-1], read_BT, use_cache=False, latents=latents, return_dict=True)
            loss = self._loss(found.passes, labels, mask_BT, num_items_in_batch, None, last=False)
            labels = None
            if not return_logits and not cached:
                return self._output(CausalLMOutputWithPast(loss=loss), return_dict)
        looped = self.training and self.config.loop_loss == "all"
        found = self.model(
            input_ids,
            attention_mask,
            None if doc_ids is not None else position_ids,
            past_key_values,
            inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=looped,  # a tuple is made faster, but has the last pass alone
            doc_ids=doc_ids,
            latents=latents,
        )
        passes = found.passes if looped else found[:1]
        more = (found.past_key_values, found.hidden_states) if looped else found[1:]
        h_BTD = passes[-1]
        if labels is not None:
            loss = self._loss(passes, labels, mask_BT, num_items_in_batch, doc_ids)
        if return_logits:
            logits_BTV = logits_of(h_BTD[:, _kept(logits_to_keep, h_BTD.shape[1])], self.lm_head, self.lookup)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            past_key_values=next((value for value in more if isinstance(value, SubquadCache)), None),
            hidden_states=next((value for value in more if isinstance(value, tuple)), None),
        )
        return self._output(output, return_dict)

    def _output(self, output: CausalLMOutputWithPast, return_dict: bool | None) -> Any:
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _loss(
        self,
        passes: tuple[Tensor, ...] | None,
        labels_BT: Tensor,
        mask_BT: Tensor | None,
        items: Tensor | int | None,
        doc_ids: Tensor | None,
        last: bool = True,
    ) -> Tensor:
        """Return the loss of vectors of all tokens or, without `last`, of all but each row's last real one."""
        assert passes is not None
        target_BT = self.model.decoder.aligned_labels(next_tokens(labels_BT, mask_BT, doc_ids), mask_BT)
        target_BT = target_BT if last else target_BT[:, :-1]
        group = active_group()
        ours_BT = target_BT if group is None else group.part(target_BT)
        reduction: Reduction = "mean" if items is None and group is None else "sum"
        loss: Tensor = self.criterion([*passes], ours_BT, self.lm_head, self.lookup, self.config.vocab_size, reduction)
        if group is not None:
            return loss * group.size / ((target_BT != IGNORED).sum().clamp(min=1) if items is None else items)
        if items is None:
            return loss
        if not torch.compiler.is_compiling():
            # Dividing by a count that includes labels without a target would scale the loss wrongly.
            if mask_BT is not None and bool((labels_BT[~mask_BT] != IGNORED).any()):
                raise ValueError(
                    "num_items_in_batch counts labels at padding, which the loss leaves out: set labels to -100 where "
                    "attention_mask is 0, as the collators of transformers do"
                )
            if doc_ids is not None and int((labels_BT[:, 1:] != IGNORED).sum()) != int((target_BT != IGNORED).sum()):
                raise ValueError(
                    "num_items_in_batch counts labels at the first tokens of documents or at padding, which the loss "
                    "leaves out: set them to -100, as DataCollatorWithFlattening does"
                )
        return loss / items

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does; `ValueError` for a prompt that ends with padding, where the next token goes
        on."""
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 2 and bool((mask[:, -1:] == 0).any()):
            rows = (mask[:, -1] == 0).nonzero().flatten().tolist()
            raise ValueError(
                f"attention_mask ends with padding in rows {rows}, and the next token follows the last column: pad "
                "prompts on the left (tokenizer.padding_side='left')"
            )
        parent: Any = super()
        return parent.generate(inputs, *args, **kwargs)

    @property
    def _is_stateful(self) -> bool:  # type: ignore[override]  # theirs is a constant of the class
        """Whether transformers refuses assisted decoding: a prompt and its draft in one pass have other latents."""
        return self.model.decoder.prompt_latents is not None

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Prepare a cache whose tokens can be removed, for assisted decoding and for an assistant."""
        parent: Any = super()
        found = parent._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)
        assisted = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        if assisted and generation_config.use_cache is not False:
            cache = checked_cache(model_kwargs.get("past_key_values")) or SubquadCache()
            cache.activate_past_recording()
            model_kwargs["past_key_values"] = cache
        return found

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        latents: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare inputs as transformers does; a prompt read into a cache gets the latents that its decoding needs."""
        cache = checked_cache(past_key_values)
        fresh = cache is None or cache.state is None
        kwargs.pop("tokenizer", None)  # of stop strings: transformers passes it on to every model
        parent: Any = super()
        inputs: dict[str, Any] = parent.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if self.model.decoder.prompt_latents is not None and inputs.get("use_cache") and fresh:
            inputs["latents"] = self.model.decoder.prompt_latents if latents is None else latents
        return inputs

    def generate_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `ValueError`: it needs a cache of pages of keys."""
        raise ValueError(
            "generate_batch keeps keys and values in pages, and a state is none: use generate, or `subquad serve`, "
            "which batches requests continuously"
        )

    def blocks_to_shard(self) -> list[nn.Module]:
        """Return the decoder's blocks."""
        blocks: list[nn.Module] = self.model.blocks_to_shard()
        return blocks

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of token vectors."""
        table: nn.Module = self.model.get_input_embeddings()
        return table

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head, tied or not; None if a look-up follows it, so that its products are not the logits."""
        return self.lm_head if self.lookup is None else None

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def get_decoder(self) -> nn.Module:
        """Return the backbone, as transformers' models do."""
        backbone: nn.Module = self.model
        return backbone

    def _init_weights(self, module: nn.Module) -> None:
        if module is not self.lm_head or not self.config.tie_embeddings:  # tied: drawn with the embedding
            self.model.decoder.initialise(module)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        """Convert as `nn.Module` does, and keep a tied head tied, which `to_empty` would give weights of its own."""
        tied = is_tied(self.lm_head, self.get_input_embeddings())
        super()._apply(*args, **kwargs)
        if tied:
            self.lm_head.weight = self.get_input_embeddings().weight
        return self

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary as transformers does, and the decoder's configuration with it; new biases are zero.

        Raises `ValueError` for a model with a look-up over the logits, whose matrices are as wide as the vocabulary.
        """
        if self.lookup is not None:
            raise ValueError(
                f"a look-up over the logits (lookup={self.config.lookup}) holds a column for each token of the "
                "vocabulary, which cannot change"
            )
        bias = self.lm_head.bias
        table = super().resize_token_embeddings(*args, **kwargs)
        if isinstance(bias, Tensor):
            new = table.num_embeddings - len(bias)
            self.lm_head.bias = nn.Parameter(F.pad(bias.detach(), (0, new)))
        self.model.take_vocabulary(table.num_embeddings)
        return table

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


def _kept(logits_to_keep: int | Tensor, outputs: int) -> slice | Tensor:
    """Return the index of the places whose logits are wanted, among `outputs` places."""
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.ndim != 1 or logits_to_keep.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                "logits_to_keep must be an integer or a tensor [N] of int64 or int32, got a tensor "
                f"{list(logits_to_keep.shape)} of {logits_to_keep.dtype}"
            )
        compiling = torch.compiler.is_compiling()
        if not compiling and bool(((logits_to_keep < -outputs) | (logits_to_keep >= outputs)).any()):
            raise ValueError(
                f"logits_to_keep must be places among the {outputs} outputs, below {outputs}, got "
                f"{logits_to_keep.tolist()}; a perceiver_ar has outputs only at its latents, the first at 0"
            )
        return logits_to_keep
    if logits_to_keep < 0:
        raise ValueError(f"logits_to_keep must be at least 0 (0: all), got {logits_to_keep}")
    return slice(-logits_to_keep, None) if logits_to_keep else slice(None)
