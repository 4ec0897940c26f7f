"""Programs that tests run in processes of their own (``tests.support.runner``), most of them SGLang
without a scheduler. Importing this package prepares a machine without a GPU for that."""

from oscar_sglang.launch_server import enter_cpu_mode, has_gpu

if not has_gpu():
    enter_cpu_mode()  # before anything imports transformers or sglang
