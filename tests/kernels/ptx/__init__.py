"""An emulated GPU: what Triton compiles a kernel to, PTX, is run on the CPU.

- `compiling`: a kernel and its arguments to a `program`, which is parsed PTX.
- `launch`: its CTAs, whose `threads` go in lock step and touch `memory`; `instructions` says what each does.
- `conflicts`: who touches what, and what a GPU might do in another `order`: Triton's interpreter is held to it too.
  `clocks`: that of warps that do different things.
- `plugin`: has pytest run the kernels' tests so. `snippets`: a few instructions alone, for tests of their own.
"""
