"""Checks in two processes that what is read from a sharded model is what an unsharded one has, and can be put back."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

from mla_convert.heal.training_state import read_optimizers, read_weights, write_optimizers, write_weights
from mla_convert.mla import MLAForCausalLM
from tests.mla.native import native, tokens


def trained(*, sharded: bool, steps: int) -> tuple[MLAForCausalLM, torch.optim.Optimizer]:
    model = native()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".self_attn." in name)
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        model(input_ids=tokens(seed=step), use_cache=False).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    first = torch.distributed.get_rank() == 0
    names = {name for name, parameter in trained(sharded=False, steps=0)[0].named_parameters() if "self_attn" in name}
    model, optimizer = trained(sharded=True, steps=2)
    weights, state = read_weights(model, names), read_optimizers(model, [optimizer])

    fresh, fresh_optimizer = trained(sharded=True, steps=0)
    write_weights(fresh, weights)
    write_optimizers(fresh, [fresh_optimizer], state)
    again = read_weights(fresh, names), read_optimizers(fresh, [fresh_optimizer])
    if first:
        plain, plain_optimizer = trained(sharded=False, steps=2)
        expected = read_weights(plain, names), read_optimizers(plain, [plain_optimizer])
        compared = 0
        for found, copy, wanted in zip((weights, state), again, expected, strict=True):
            assert found.keys() == copy.keys() == wanted.keys()
            for name, value in wanted.items():
                # gradients are averaged over two equal ones, in another order
                torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
                assert torch.equal(found[name], copy[name])
            compared += 1
        (folder / "compared").write_text(str(compared))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
