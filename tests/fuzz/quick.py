import sys, time, logging, tempfile, collections
from pathlib import Path
logging.disable()
import os; os.environ["SUBQUAD_CACHE"]=tempfile.mkdtemp()
from tests.fuzz.run import Tried, kept
from tests.fuzz.targets import TARGETS
names=sys.argv[2:] or list(TARGETS)
mult=float(sys.argv[1])
for name in names:
    t=time.time()
    tr=Tried(name, Path(tempfile.mkdtemp()))
    made=time.time()-t
    c=collections.Counter(); seen=collections.Counter(); 
    ok=tr.attempt(tr.input(0)._replace(content=(tr.valid/tr.files[0]).read_bytes(), file=tr.files[0]))
    if ok.kind!="read": tr.restore(); print(name,"VALID INPUT REFUSED", ok.fault or ok.kind)
    if ok.kind!="read":
        try: tr.target.read(tr.folder)
        except Exception as e: print(repr(e)[:400])
    t=time.time()
    for n in range(int(TARGETS[name].quick*mult)):
        o=tr.attempt(tr.input(n)); c[o.kind]+=1
        if o.fault:
            lines=o.fault.strip().splitlines()
            key=lines[-1][:160]+" @ "+" < ".join(l.strip()[:90] for l in reversed(lines) if 'File "/tmp/w8' in l and 'tests/fuzz' not in l)[:300]
            if key not in seen: print("  FAULT", name, n, tr.input(n).file, key, flush=True)
            seen[key]+=1
    print(f"{name} made {made:.2f}s {dict(c)} {time.time()-t:.2f}s", flush=True)
