"""Usual training loops as cases of a table: the cell that one trains, the cases, and the judgement."""
