"""Every task of reasoning-gym: time to make problems, and whether a task accepts its own answers."""
