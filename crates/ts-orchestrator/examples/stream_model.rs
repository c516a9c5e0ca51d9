// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams the layers of a checkpoint by name, and prints what they contain.
//!
//! ```sh
//! cargo run -p tensorstream-orchestrator --example stream_model -- PATH [BUDGET_MIB]
//! ```

use std::error::Error;
use std::io::Write;

use ts_orchestrator::{Bytes, Model};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: stream_model PATH [BUDGET_MIB]")?;
    let budget = arguments.next().map_or(Ok(600), |mib| mib.parse())?;
    let model = Model::open(path)?.budget(Bytes::mib(budget)).build()?;
    let mut out = std::io::stdout();
    let pass = model.pass()?;
    for name in model.units() {
        let unit = pass.unit(name)?;
        for (name, tensor) in unit.tensors() {
            let (dtype, shape) = (tensor.dtype(), tensor.shape());
            let nonzero = tensor.iter().filter(|&&byte| byte != 0).count();
            writeln!(
                out,
                "{name}: {dtype} {shape:?}, {nonzero} of {} bytes are not 0",
                tensor.len()
            )?;
        }
    }
    Ok(())
}
