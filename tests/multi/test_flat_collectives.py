import torch, torch.distributed as dist, pytest
from harness import distributed
from booster.comm import *
@distributed([1,2,3,4])
@pytest.mark.parametrize("dtype",[torch.float32,torch.bfloat16,torch.float16])
def test_it(world_size,dtype):
    r=dist.get_rank(); n=300001
    pays=[torch.randn(world_size*n,generator=torch.Generator().manual_seed(q)).to(dtype) for q in range(world_size)]
    mine=pays[r].clone()
    exp=sum(pays[(r+d)%world_size][r*n:(r+1)*n].float() for d in range(world_size))
    out=torch.empty(n,dtype=dtype); o32=torch.ones(n)
    a=start_reduce_scatter(mine); b=start_reduce_scatter(mine)
    buf=torch.full((world_size*10,),-1.,dtype=dtype); buf[r*10:r*10+10]=r
    g=start_all_gather(buf)
    a.finish(out,accumulate=False); b.finish(o32,accumulate=True); g.wait()
    assert torch.equal(out,exp.to(dtype)); assert torch.equal(o32,exp+1)
    assert torch.equal(buf, torch.arange(world_size).repeat_interleave(10).to(dtype))
