import copy

import accelerate
import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import mla_kernels.decode
import mla_kernels.hf
from mla_kernels.backends import Backend
from mla_kernels.errors import InvalidInputError
from mla_kernels.hf import restore, use_mla_kernels
from tests.kernels.deepseek import CACHE, CLOSE, random_ids, step_logits, tiny_model


@pytest.fixture(params=["v2", "v3"])
def family(request):
    return request.param


@pytest.fixture
def expansions(monkeypatch):
    """The token counts of all calls of the stock `expand_kv` so far."""
    calls = []
    for attention in mla_kernels.hf._STOCK_EAGER:

        def counted(self, kv_nope, k_rot, stock=attention.expand_kv):
            calls.append(kv_nope.shape[2])
            return stock(self, kv_nope, k_rot)

        monkeypatch.setattr(attention, "expand_kv", counted)
    return calls


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_decode_steps_give_the_stock_logits_without_expanding(family, implementation, q_lora_rank, expansions):
    model = tiny_model(family, q_lora_rank=q_lora_rank)
    model.set_attn_implementation(implementation)
    ids, steps = random_ids(2, 17), [10, 1, 1, 4, 1]
    expected = step_logits(model, ids, steps)
    assert expansions == [10, 10, 11, 11, 12, 12, 16, 16, 17, 17]
    expansions.clear()
    use_mla_kernels(model)
    torch.testing.assert_close(step_logits(model, ids, steps), expected, **CLOSE)
    assert expansions == [10, 10]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_left_padded_batches(family, implementation, expansions):
    model = tiny_model(family)
    model.set_attn_implementation(implementation)
    ids = random_ids(3, 14)
    mask = torch.ones_like(ids)
    mask[0, :6] = mask[1, :1] = 0
    ids[mask == 0] = 0
    expected = step_logits(model, ids, [10, 1, 2, 1], mask)
    use_mla_kernels(model)
    expansions.clear()
    logits = step_logits(model, ids, [10, 1, 2, 1], mask)
    assert expansions == [10, 10]
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **CLOSE)


def test_generate_writes_the_same(family, expansions):
    model = tiny_model(family)
    ids = random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ids[0, :4] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **settings)
    use_mla_kernels(model)
    expansions.clear()
    assert torch.equal(model.generate(ids, **settings), expected)
    assert expansions == [9, 9]
    beams = model.generate(ids, num_beams=2, **settings)
    restore(model)
    assert torch.equal(beams, model.generate(ids, num_beams=2, **settings))


def test_a_static_cache(family, expansions):
    """Its unused slots are masked, and a prompt's keys reach beyond the prompt."""
    model = tiny_model(family)
    ids, steps = random_ids(2, 12), [9, 1, 2]

    def static():
        return {CACHE: transformers.StaticCache(config=model.config, max_cache_len=20)}

    expected = step_logits(model, ids, steps, **static())
    use_mla_kernels(model)
    expansions.clear()
    torch.testing.assert_close(step_logits(model, ids, steps, **static()), expected, **CLOSE)
    assert expansions == [20, 20]


def test_attention_weights_are_returned_where_stock_returns_them(family):
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    ids = random_ids(2, 8)

    @torch.no_grad()
    def attentions():
        prompt = model(ids[:, :7], use_cache=True)
        return model(ids[:, 7:], use_cache=True, output_attentions=True, **{CACHE: prompt[CACHE]}).attentions

    expected = attentions()
    use_mla_kernels(model)
    weights = attentions()
    assert len(weights) == 2
    for mine, stock in zip(weights, expected, strict=True):
        assert mine.shape == (2, 3, 1, 8)
        torch.testing.assert_close(mine, stock, **CLOSE)


def test_without_a_cache_nothing_changes(family, expansions):
    model = tiny_model(family)
    ids = random_ids(2, 8)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        use_mla_kernels(model)
        expansions.clear()
        assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert expansions == [8, 8]


def test_a_long_continuation_is_expanded(family, expansions):
    """S queries save where S (2C - N - V) < C (N + V): here up to 53."""
    model = tiny_model(family)
    ids = random_ids(1, 111)
    expected = step_logits(model, ids, [4, 54, 53])
    use_mla_kernels(model)
    expansions.clear()
    torch.testing.assert_close(step_logits(model, ids, [4, 54, 53]), expected, **CLOSE)
    assert expansions == [4, 4, 58, 58]


def test_restore_leaves_no_trace(family, expansions):
    model = tiny_model(family)
    before = [dict(layer.self_attn.__dict__) for layer in model.model.layers]
    ids = random_ids(1, 6)
    expected = step_logits(model, ids, [5, 1])
    use_mla_kernels(model)
    restore(model)
    restore(model)
    for layer, attributes in zip(model.model.layers, before, strict=True):
        assert layer.self_attn.__dict__ == attributes
        assert layer.self_attn.config is model.config
    expansions.clear()
    assert torch.equal(step_logits(model, ids, [5, 1]), expected)
    assert expansions == [5, 5, 6, 6]


def test_a_second_call_changes_nothing(family):
    model = tiny_model(family)
    use_mla_kernels(model)
    before = [dict(layer.self_attn.__dict__) for layer in model.model.layers]
    use_mla_kernels(model)
    assert [layer.self_attn.__dict__ for layer in model.model.layers] == before
    restore(model)
    assert all(layer.self_attn.config is model.config for layer in model.model.layers)


def test_other_models_and_the_configuration_are_untouched(family, expansions):
    model = tiny_model(family)
    sibling = type(model)(model.config).eval()
    settings = model.config.to_dict()
    use_mla_kernels(model)
    assert model.config.to_dict() == settings
    assert model.config._attn_implementation == sibling.config._attn_implementation != "mla_kernels"
    expansions.clear()
    step_logits(sibling, random_ids(1, 6), [5, 1])
    assert expansions == [5, 5, 6, 6]


def test_the_implementation_can_be_changed_afterwards(family):
    model = tiny_model(family)
    ids, steps = random_ids(2, 8), [6, 1, 1]
    expected = step_logits(model, ids, steps)
    use_mla_kernels(model)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        torch.testing.assert_close(step_logits(model, ids, steps), expected, **CLOSE)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InvalidInputError, match="flash_attention_2"):
        step_logits(model, ids, steps)


def test_a_copy_is_switched_for_itself(family, expansions):
    model = tiny_model(family)
    use_mla_kernels(model)
    twin = copy.deepcopy(model)
    assert twin.model.layers[0].self_attn.mla_kernels_stock.config is twin.config
    restore(model)
    expansions.clear()
    step_logits(twin, random_ids(1, 6), [5, 1])
    assert expansions == [5, 5]


def test_saving_writes_the_stock_model(family, tmp_path):
    model = tiny_model(family)
    ids = random_ids(1, 6)
    expected = step_logits(model, ids, [5, 1])
    use_mla_kernels(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(step_logits(again, ids, [5, 1]), expected, **CLOSE)


def test_gradients_of_a_decode_step(family, monkeypatch):
    """The kernel has none, so that it is not called where one is wanted."""
    model = tiny_model(family)
    ids = random_ids(1, 6)
    with torch.no_grad():
        prompt = model(ids[:, :5], use_cache=True)

    def gradient():
        model.zero_grad()
        cache = copy.deepcopy(prompt[CACHE])
        model(ids[:, 5:], use_cache=True, **{CACHE: cache}).logits.square().sum().backward()
        return model.model.layers[0].self_attn.kv_b_proj.weight.grad.clone()

    expected = gradient()
    use_mla_kernels(model)
    monkeypatch.setattr(mla_kernels.hf, "choose_backend", lambda *_: Backend("triton", "forced"))
    monkeypatch.setattr(mla_kernels.hf, "mla_decode", None)
    mine = gradient()
    assert expected.any()
    # Relative to the largest entry, since single ones cancel.
    assert (mine - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_projection_that_was_wrapped_later_is_called(family, expansions):
    """Its weight alone would miss what the wrapper adds."""

    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return 1.5 * self.base(x)

    model = tiny_model(family)
    use_mla_kernels(model)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Adapted(layer.self_attn.kv_b_proj)
    ids = random_ids(1, 6)
    expansions.clear()
    logits = step_logits(model, ids, [5, 1])
    assert expansions == [5, 5, 6, 6]
    restore(model)
    assert torch.equal(step_logits(model, ids, [5, 1]), logits)


def test_offloaded_weights_are_left_to_their_hooks(family, expansions):
    """Between calls such a weight is on the meta device."""
    model = tiny_model(family)
    ids = random_ids(1, 6)
    expected = step_logits(model, ids, [5, 1])
    accelerate.cpu_offload(model, execution_device="cpu")
    use_mla_kernels(model)
    expansions.clear()
    assert model.model.layers[0].self_attn.kv_b_proj.weight.is_meta
    torch.testing.assert_close(step_logits(model, ids, [5, 1]), expected, **CLOSE)
    assert expansions == [5, 5, 6, 6]


def test_dropout_and_autocast_take_the_stock_path(family, expansions):
    """The kernels have no dropout; under autocast query and cached latent can come in two dtypes."""
    ids = random_ids(2, 7)
    outcomes = []
    for switch in (False, True):
        model = tiny_model(family, attention_dropout=0.5)
        if switch:
            use_mla_kernels(model)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = step_logits(model, ids, [5, 1, 1])
        torch.manual_seed(2)
        dropped = step_logits(model.train(), ids, [5, 1, 1])
        outcomes.append((mixed, dropped))
    for stock, switched in zip(*outcomes, strict=True):
        assert torch.equal(stock, switched)
    assert expansions == [5, 5, 6, 6, 7, 7] * 4


def test_a_16_bit_model_is_as_close_to_its_float32_self_as_stock_is(family):
    """Absorbed and expanded round in different places, so only their distances from the exact logits compare."""
    model = tiny_model(family, first_k_dense_replace=2).bfloat16()
    ids, steps = random_ids(8, 12), [8, 1, 2, 1]
    exact = step_logits(copy.deepcopy(model).float(), ids, steps)
    stock = step_logits(model, ids, steps)
    use_mla_kernels(model)
    absorbed = step_logits(model, ids, steps)
    assert absorbed.dtype == torch.bfloat16
    # Both are norms over 8 x 4 x 64 rounding errors; a quarter more would be a systematic loss.
    assert (absorbed - exact)[:, 8:].norm() <= 1.25 * (stock - exact)[:, 8:].norm()


def test_on_a_gpu_unmasked_steps_go_through_the_kernel(family, monkeypatch):
    """The real kernel, interpreted where there is no GPU; only the choice is forced."""
    model = tiny_model(family)
    ids, steps = random_ids(2, 12), [9, 1, 1, 1]
    expected = step_logits(model, ids, steps)
    use_mla_kernels(model)
    calls = []

    def recorded(*args, **kwargs):
        calls.append(args[0].shape)
        return mla_kernels.decode.mla_decode(*args, **kwargs)

    monkeypatch.setattr(mla_kernels.hf, "choose_backend", lambda *_: Backend("triton", "forced"))
    monkeypatch.setattr(mla_kernels.hf, "mla_decode", recorded)
    torch.testing.assert_close(step_logits(model, ids, steps), expected, **CLOSE)
    assert calls == [(2, 1, 3, 48)] * 6


def test_other_models_are_refused():
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(InvalidInputError, match="LlamaForCausalLM"):
        use_mla_kernels(llama)
    restore(llama)


def test_other_attention_implementations_are_refused(family):
    model = tiny_model(family)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(InvalidInputError, match="set_attn_implementation"):
        use_mla_kernels(model)
    assert model.model.layers[0].self_attn.config is model.config


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_projections_are_refused(family, dtype):
    """And nothing is switched by half."""
    model = tiny_model(family)
    last = model.model.layers[-1].self_attn
    last.kv_b_proj.weight = torch.nn.Parameter(last.kv_b_proj.weight.to(dtype), requires_grad=False)
    with pytest.raises(InvalidInputError, match="kv_b_proj of layer 1"):
        use_mla_kernels(model)
    assert model.model.layers[0].self_attn.config is model.config
