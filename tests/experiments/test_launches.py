"""experiments/launches.py: how launches are counted in generated code. The code is written by hand."""

from experiments.launches import launches

CODE = """
extern_kernels.mm(before, call)
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', ...)

class Runner:
    def call(self, args):
        # Topologically Sorted Source Nodes: triton_poi_fused_add_0.run(commented, out)
        primals_1, primals_2 = args
        buf0 = empty_strided_cuda((8, 16), (16, 1), torch.bfloat16)
        stream0 = get_raw_stream(0)
        triton_poi_fused__to_copy_0.run(primals_1, buf0, 128, stream=stream0)
        extern_kernels.mm(buf0, reinterpret_tensor(primals_2, (16, 8), (1, 16), 0), out=buf1)
        extern_kernels.addmm(buf1, buf2, buf3, alpha=1, beta=1, out=buf4)
        # triton_poi_fused_add_1.run(buf1, out)
        buf5 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf1, buf2, buf3, 0.0, True)
        assert_size_stride(buf6, (8, 16), (16, 1), 'torch.ops.aten._scaled_dot_product_flash_attention.default')
        triton_red_fused_mul_sum_1.run(buf4, buf7, 8, 16, stream=stream0)
        del buf4
        return (buf7, )
"""


def test_kernels_products_and_attention_are_launches():
    """Not comments, definitions, allocations, or checks of sizes."""
    assert launches(CODE) == 5


def test_one_call_less_is_one_launch_less():
    for call in ("triton_red_fused_mul_sum_1.run", "extern_kernels.addmm", "= torch.ops.aten._scaled"):
        assert launches("\n".join(line for line in CODE.splitlines() if call not in line)) == 4
