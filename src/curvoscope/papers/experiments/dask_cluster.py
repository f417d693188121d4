"""The same tasks on a Dask cluster."""

from collections.abc import Sequence

from curvoscope.errors import RangeError
from curvoscope.papers.experiments.runner import Results, Task, WorkerError


def on_dask(tasks: Sequence[Task], address: str, jobs: int) -> Results:
    """Results as they come, from the scheduler at `address`, or from `jobs` new processes for "local"."""
    try:
        from dask.distributed import Client, KilledWorker, LocalCluster, as_completed
    except ImportError as error:
        raise RangeError("dask", "needs the extra: pip install 'curvoscope[dask]'") from error
    try:
        if address == "local":
            cluster = LocalCluster(n_workers=jobs, threads_per_worker=1, processes=True, dashboard_address=None)
            client = Client(cluster)
        else:
            cluster, client = None, Client(address, timeout=10)
    except OSError as error:
        raise RangeError(
            "dask", f"no scheduler answers at {address!r} ({error}); give its address or 'local'"
        ) from error
    try:
        futures = {client.submit(task.job, pure=False): task for task in tasks}
        for future in as_completed(list(futures)):
            task = futures.pop(future)
            try:
                values = future.result()
            except KilledWorker as error:
                raise WorkerError("dask", f"workers died while measuring {task}; what was measured stays") from error
            yield task, values
    finally:
        client.close()
        if cluster is not None:
            cluster.close()
