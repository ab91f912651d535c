"""The harness: a task and a way to exchange gradients, measured on simulated or real ranks, become a record."""
