import sys; sys.path.insert(0,'/tmp/sv/wire')
import tempfile, pathlib
from tests.dist.pool import Pool
from tests.dist.test_schedules import *
def raw(rank, pp, config, times):
    import smp
    import os
    if rank==0:
        os.dup2(os.open("/tmp/sv/wt/rank0.log",os.O_WRONLY|os.O_CREAT|os.O_TRUNC),1)
    executed(rank, pp, config, times)
    st=smp.metrics.runtime.current().server.stats()
    return smp.metrics.executed_order(), st
def main():
    p=Pool()
    s=sys.argv[1]; pp=int(sys.argv[2])
    d=pathlib.Path(tempfile.mkdtemp())
    nc=2 if s.startswith("virt") else 1
    cfg={"pipeline":s,"microbatches":2*pp,"partition_file":write_partition(d/"p",pp,nc)}
    import tests.dist
    for o,st in p.run(pp, raw, pp, cfg, [(.03,.03,.03)]*(pp*nc)):
        print(" ".join(o)); print({k:v for k,v in st.items()})
    p.close()
