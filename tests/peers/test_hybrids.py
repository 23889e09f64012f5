"""transformers' models with recurrent layers: packing, padding and caches, where its Llama and ours are right."""

import pytest
import torch

from subquad.models.decoder import Decoder, DecoderConfig
from subquad.testing import assert_same_maths

VOCAB = 40
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, **ENDS}
SHAPE = {"intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2, **SIZES}
KINDS = {"layer_types": ["linear_attention", "full_attention"]}
GATED = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
DENSE = {"num_local_experts": 2, "num_experts_per_tok": 1, "mlp_layer_types": ["dense", "dense"]}
STATES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
MODELS = {  # their names, and options of their configurations
    "llama": ("Llama", SHAPE),
    "qwen3_next": ("Qwen3Next", {**SHAPE, **KINDS, **GATED, "head_dim": 16, "mlp_only_layers": [0, 1]}),
    "olmo_hybrid": ("OlmoHybrid", {**SHAPE, **KINDS, **GATED}),
    "kimi_linear": (
        "KimiLinear",
        {**SHAPE, **KINDS, **LATENT, **DENSE, "linear_head_dim": 8, "linear_num_heads": 2},
    ),
    "bamba": ("Bamba", {**SHAPE, **STATES, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", {**SHAPE, **STATES, "mamba_d_ssm": 64}),
    "mamba2": ("Mamba2", {**SIZES, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16}),
    "xlstm": ("xLSTM", {**SIZES, "hidden_size": 128, "num_heads": 2, "chunk_size": 16}),
}
HYBRIDS = [name for name in MODELS if name not in ("llama", "mamba2", "xlstm")]


@pytest.fixture
def build_model(peer, torch_forms):
    """`build_model(name)`: a tiny model of transformers with large random weights, in float64."""

    def make(name, **options):
        torch_forms(name)
        kind, sizes = MODELS[name]
        library = peer("transformers")
        torch.manual_seed(0)
        config = getattr(library, f"{kind}Config")(**sizes | options)
        model = getattr(library, f"{kind}ForCausalLM")(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=0.3)
        return model

    return make


@pytest.fixture(autouse=True)
def without_gradients_in_double(in_double):
    with torch.no_grad(), in_double():
        yield


def draw(*shape, seed=0):
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def cache_of(found):
    """Return the argument that continues a result of theirs."""
    name = "past_key_values" if getattr(found, "past_key_values", None) is not None else "cache_params"
    return {name: getattr(found, name)}


def error(found, expected):
    return (found - expected).abs().max() / expected.abs().max()


def compare(name, what, found, expected, note):
    """Assert that a Llama is right, and that the others are wrong."""
    if name == "llama":
        assert_same_maths(found, expected, what)
    else:
        note("transformers", f"error: {name}, {what}", error(found, expected))
        assert error(found, expected) > 1e-2


@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
def test_packed_by_position_ids_they_leak_into_the_next_document(build_model, note, name):
    model, first, second = build_model(name), draw(1, 11), draw(1, 9, seed=1)
    positions = torch.cat([torch.arange(11), torch.arange(9)])[None]
    packed = model(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits[:, 11:]
    compare(name, "packed by position_ids", packed, model(second).logits, note)


@pytest.mark.parametrize("name", ["llama", *HYBRIDS, "mamba2"])
def test_a_prompt_padded_at_the_right_is_continued_wrong(build_model, note, name):
    model, tokens, mask = build_model(name), draw(1, 11), torch.tensor([10 * [1] + 3 * [0] + [1]])
    padded = torch.cat([tokens[:, :10], torch.zeros(1, 3, dtype=torch.long)], 1)
    found = model(padded, attention_mask=mask[:, :13], use_cache=True)
    rest = {} if name == "mamba2" else {"attention_mask": mask, "position_ids": torch.tensor([[10]])}
    after = model(tokens[:, 10:], **rest, **cache_of(found)).logits[:, -1]
    compare(name, "a right-padded prompt continued", after, model(tokens).logits[:, -1], note)


@pytest.mark.parametrize("kind", ["gated_delta_net", "kda", "mamba2", "mlstm"])
def test_ours_keep_documents_apart_and_padding_out(kind):
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=VOCAB, dim=32, num_heads=2, num_layers=2, attention=[kind, "full"])
    model, first, second = Decoder(config).double().eval(), draw(1, 11), draw(1, 9, seed=1)
    documents = torch.tensor([11 * [0] + 9 * [1]])
    packed = model(torch.cat([first, second], 1), doc_ids=documents)[0][:, 11:]
    assert_same_maths(packed, model(second)[0], "packed")
    padded, mask = torch.cat([first[:, :10], torch.zeros(1, 3, dtype=torch.long)], 1), torch.ones(1, 13).bool()
    mask[:, 10:] = False
    after = model(first[:, 10:], model(padded, mask=mask)[1])[0]
    assert_same_maths(after, model(first)[0][:, 10:], "a right-padded prompt continued")


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_bamba_needs_the_position_of_a_token_after_a_cache(build_model, note, name):
    model, tokens = build_model(name), draw(1, 11)
    whole, prompt = model(tokens).logits[:, -1], model(tokens[:, :10], use_cache=True)
    after = model(tokens[:, 10:], **cache_of(prompt)).logits[:, -1]
    compare(name, "a token after a cache, without position_ids", after, whole, note)
    prompt = model(tokens[:, :10], use_cache=True)
    told = model(tokens[:, 10:], position_ids=torch.tensor([[10]]), **cache_of(prompt)).logits[:, -1]
    assert_same_maths(told, whole, "with position_ids")


def test_kimi_linear_without_full_attention_has_no_cache(build_model):
    model = build_model("kimi_linear", layer_types=2 * ["linear_attention"])
    with pytest.raises(ValueError, match="only contain LinearAttention layers"):
        model(draw(1, 5), use_cache=True)


def test_xlstm_ignores_the_attention_mask(build_model, note):
    model, tokens = build_model("xlstm"), draw(1, 11)
    padded, mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens], 1), torch.tensor([3 * [0] + 11 * [1]])
    found = model(padded, attention_mask=mask).logits
    assert_same_maths(found, model(padded).logits, "with and without a mask")
    note("transformers", "error: xlstm, padded at the left", error(found[:, 3:], model(tokens).logits))
    assert error(found[:, 3:], model(tokens).logits) > 1e-2


def test_xlstm_has_caches_for_some_widths_only(build_model):
    with pytest.raises(ValueError, match="matC_old has wrong shape"):
        build_model("xlstm", hidden_size=96)(draw(1, 5), use_cache=True)


def test_xlstms_training_with_padding_does_not_run(build_model):
    model = build_model("xlstm", mode="train_with_padding", return_last_states=False)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        model(draw(1, 5), use_cache=False)
