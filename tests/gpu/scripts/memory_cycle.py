"""Free device memory before, during and after a use of the cache, in MiB. Prints JSON."""

import gc
import json
import sys
import weakref

import torch

from graph_cache import GraphCache
from graph_cache.layout import SequenceLayout
from graph_cache.tiny import tiny_transformer
from graph_cache.workload import Workload

torch.set_grad_enabled(False)
arrangement = sys.argv[1]


def free() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] >> 20


model = tiny_transformer(dtype=torch.bfloat16, device="cuda", layers=8, heads=16)
work = Workload(model, [SequenceLayout((50,), (), (1, 64, 64))])
# A first use loads kernels and BLAS workspaces, which stay with the process.
with GraphCache.attach(model, arrangement=arrangement, headroom_bytes=0) as cache:
    work.run(7)
    first = cache.report().eager_reasons
before = free()
with GraphCache.attach(model, arrangement=arrangement, headroom_bytes=0) as cache:
    work.run(7)
    report = cache.report()
    held = {"buffers": report.buffer_bytes >> 20, "graphs": report.graph_bytes >> 20}
    graphs = [weakref.ref(entry.captured) for entry in cache._dispatcher.store]
    during = free()
    cache.release_graphs()
    released = free()
    alive = [graph() is not None for graph in graphs]
after = free()
print(
    json.dumps(
        {
            "eager at first": first,
            "held": held,
            "taken": before - during,
            "taken without graphs": before - released,
            "kept": before - after,
            "alive": alive,
        }
    )
)
