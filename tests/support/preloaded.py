"""Processes that have loaded torch and this package already, which takes each new one seconds."""

import multiprocessing

MODULES = ["curvoscope.curvature", "curvoscope.papers.experiments", "torch._dynamo", "torch.distributed.fsdp"]


def preloaded():
    """A context of `multiprocessing`: its processes are forks of a server, and share nothing else with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context
