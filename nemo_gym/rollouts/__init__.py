"""What a collection of rollouts is made of; `rollout_collection` is the way in."""
