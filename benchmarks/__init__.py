"""Side by side with the peers and with the limits of the machine: ratios measured in one run."""
