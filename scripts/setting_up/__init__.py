"""What scripts/setup is made of beside itself: the needs of a build, the choice of torch, and the patches of Horovod."""
