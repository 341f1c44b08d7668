import pytest
import torch

from mla_convert.heal.gradients import output_metrics
from mla_convert.sources import open_source
from tests.tiny import save_source, tiny_llama, tiny_olmo2


@pytest.mark.parametrize("make", [tiny_llama, tiny_olmo2], ids=["norms before", "norms after"])
def test_moments_are_those_of_gradients_taken_one_layer_at_a_time(make, tmp_path):
    """Against autograd on a model to which a variable is added where attention adds, with labels drawn alike."""
    model = open_source(str(save_source(make(), tmp_path / "source"))).load_decoder(dtype=torch.float32)
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    found = output_metrics(model, ids, seed=5)
    for index, layer in enumerate(model.model.layers):
        total = torch.zeros(model.config.hidden_size, model.config.hidden_size)
        for row in range(len(ids)):
            generator = torch.Generator().manual_seed(5 * 1_000_003 + row)
            added = torch.zeros(1, ids.shape[1], model.config.hidden_size, requires_grad=True)
            kept: dict[str, torch.Tensor] = {}

            def before(_module, args, kwargs, kept=kept):
                kept["state"] = (args[0] if args else kwargs["hidden_states"]).detach()

            def attention_adds(attended, layer=layer, kept=kept, added=added):
                kept["output"] = type(layer).added(layer, attended).detach()
                return type(layer).added(layer, attended) + added

            handles = [layer.register_forward_pre_hook(before, with_kwargs=True)]
            layer.added = attention_adds
            logits = model(ids[row : row + 1], use_cache=False).logits[0]
            for handle in handles:
                handle.remove()
            del layer.added
            cumulative = logits.detach().softmax(-1).cumsum(-1, dtype=torch.float64)
            drawn = torch.rand(len(cumulative), 1, dtype=torch.float64, generator=generator)
            labels = torch.searchsorted(cumulative, drawn * cumulative[:, -1:])[:, 0].clamp_max(logits.shape[1] - 1)
            torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
            assert added.grad is not None
            norm = (kept["state"] + kept["output"]).norm(dim=-1, keepdim=True)
            gradient = (added.grad * norm)[0]
            total += gradient.mT @ gradient
        torch.testing.assert_close(found[index], total / total.diagonal().mean(), atol=1e-4, rtol=1e-3)


def test_the_teacher_is_left_as_it_was():
    model = tiny_llama().eval()
    model.model.norm.weight.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    output_metrics(model, torch.randint(3, 60, (1, 8)), seed=0)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
