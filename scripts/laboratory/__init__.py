"""The laboratory: everything that gradcomp measures, and the rooms of the cluster, the GPU check and the demo beside it."""
