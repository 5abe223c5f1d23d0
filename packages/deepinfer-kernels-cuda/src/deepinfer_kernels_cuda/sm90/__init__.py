"""Kernels written for Hopper in Gluon: explicit layouts, warpgroup MMA, producer and consumer warps."""
