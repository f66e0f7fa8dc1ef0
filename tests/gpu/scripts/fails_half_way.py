"""A capture fails with tensors alive; what the process can still do. Prints JSON."""

import gc
import json

import torch
from helpers import TEXT, same

from graph_cache import GraphCache
from graph_cache.tiny import tiny_transformer
from graph_cache.workload import Workload

torch.set_grad_enabled(False)
STEPS = 7
model = tiny_transformer(dtype=torch.bfloat16, device="cuda", layers=4, heads=4)
work = Workload(model, [TEXT])
expected = work.run(STEPS).outputs
cache = GraphCache.attach(model, headroom_bytes=0)
mlp = model.transformer_blocks[2].img_mlp
plain = type(mlp).forward


def failing(self, hidden):
    if torch.cuda.is_current_stream_capturing() and self is mlp:
        raise RuntimeError("this kernel cannot be captured")
    return plain(self, hidden)


type(mlp).forward = failing
first = same(work.run(STEPS).outputs, expected)
report = cache.report()
type(mlp).forward = plain
gc.collect()
cache.clear()
second = same(work.run(STEPS).outputs, expected)
torch.cuda.synchronize()
print(
    json.dumps(
        {
            "equal": [first, second],
            "eager": report.eager_reasons,
            "sentence": report.fallbacks["capture_failed"].sentence,
            "afterwards": cache.report().counts,
            "eager afterwards": cache.report().eager_reasons,
        }
    )
)
