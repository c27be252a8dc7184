"""The generated CUDA of our GPU programs, executed on the CPU.

A module is compiled as for a GPU (TVM's host code, its argument checks and tensor maps), but its
CUDA source goes through `translate` and g++ (`toolchain`), and a stand-in for the driver
(`driver.cpp`) calls the outcome. Everything happens in processes of their own (`processes`), which
never see a real driver. `attention` is what tests and `emulate.py` use.
"""
