import torch

from mla_convert.heal.gradients import output_metrics
from tests.tiny import tiny_llama


def test_moments_are_those_of_gradients_taken_one_layer_at_a_time():
    """Against autograd on a model whose one layer's attention output has a variable added, with labels drawn alike."""
    model = tiny_llama().eval()
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

            def after(_module, _args, result, kept=kept, added=added):
                kept["output"] = result[0].detach()
                return (result[0] + added, *result[1:])

            handles = [
                layer.register_forward_pre_hook(before, with_kwargs=True),
                layer.self_attn.register_forward_hook(after),
            ]
            logits = model(ids[row : row + 1], use_cache=False).logits[0]
            for handle in handles:
                handle.remove()
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
