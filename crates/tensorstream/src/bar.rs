// SPDX-License-Identifier: MIT OR Apache-2.0
use indicatif::{ProgressBar, ProgressStyle};

use crate::Progress;

/// A progress bar on standard error: nothing where that is no terminal, or the job is over at once.
#[derive(Debug)]
pub struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// A bar for a job that is called `label`.
    pub fn new(label: impl Into<String>) -> Self {
        let bar = ProgressBar::new(0).with_message(label.into());
        let template =
            "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
        bar.set_style(ProgressStyle::with_template(template).expect("the template is well-formed"));
        Self { bar }
    }

    /// A bar that shows nothing.
    pub fn hidden() -> Self {
        Self { bar: ProgressBar::hidden() }
    }

    /// Shows how far the job is.
    pub fn show(&self, progress: Progress) {
        self.bar.set_length(progress.total);
        self.bar.set_position(progress.done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
