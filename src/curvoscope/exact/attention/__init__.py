"""Self-attention: its forward pass, its moments and its Hessian in closed form."""
