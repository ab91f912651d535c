"""Drawings of the algorithms' pages: one real step of simulated ranks on a small example, as SVG."""
