"""The error of a command that cannot be carried out. It stands alone: gpu_check runs before gradcomp is built."""


class Refused(ValueError):
    """A command that cannot be carried out. The message says what is wrong and what to do."""
