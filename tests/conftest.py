import os

import torch
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking nested autodiff takes longer than it saves
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("default")
