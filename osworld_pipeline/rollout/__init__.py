"""Episodes against real desktops: the env client, the policy engines, the episode loop, groups, reward and replay."""
