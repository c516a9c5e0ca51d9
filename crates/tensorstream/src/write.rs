// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::BTreeMap;
use std::path::Path;

use ts_format::{ContainerWriter, SafetensorsLayout, TensorMeta};

use crate::atomic::{AtomicFile, Claim};
use crate::{Checkpoint, Error};

/// What a file shall hold: a tensor's name, type, and address modulo 64 if it must have one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewTensor {
    /// Its name.
    pub name: String,
    /// Its element type and shape.
    pub meta: TensorMeta,
    /// Where its data shall begin, modulo 64. `.ts` files keep this, 0 if `None`; safetensors files cannot.
    pub phase: Option<u8>,
}

/// A container format, as a file's suffix names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `.ts`
    Container,
    /// `.safetensors`
    Safetensors,
}

impl Format {
    /// The format that a path's suffix names.
    ///
    /// # Errors
    /// [`Error::UnknownSuffix`].
    pub fn of(path: &Path) -> Result<Self, Error> {
        match path.extension().and_then(|suffix| suffix.to_str()) {
            Some("ts") => Ok(Self::Container),
            Some("safetensors") => Ok(Self::Safetensors),
            _ => Err(Error::UnknownSuffix { path: path.into() }),
        }
    }
}

/// Whether a file's index lists just these tensors, with this metadata and fingerprint.
fn holds(
    there: &Checkpoint,
    tensors: &[NewTensor],
    metadata: &BTreeMap<String, String>,
    fingerprint: Option<u128>,
) -> bool {
    let catalog = there.catalog();
    let same = |t: &NewTensor| catalog.tensor(&t.name).is_some_and(|entry| entry.meta == t.meta);
    catalog.tensors().len() == tensors.len()
        && tensors.iter().all(same)
        && catalog.files().iter().all(|file| file.metadata == *metadata)
        && fingerprint.is_none_or(|wanted| there.fingerprint() == Some(wanted))
}

/// Writes a `.ts` or `.safetensors` file that appears whole or not at all.
///
/// All tensors are declared first; then [`write`](Self::write) takes their bytes in the order that
/// [`order`](Self::order) says, and [`commit`](Self::commit) gives the file its name. If it is dropped before that,
/// or the process dies, what had the name before still has it.
#[derive(Debug)]
pub struct FileWriter {
    file: AtomicFile,
    tensors: Vec<NewTensor>,
    order: Vec<usize>,
    /// The place in `order` of the tensor that is being written, and how many of its bytes are missing.
    at: usize,
    missing: u64,
    container: Option<ContainerWriter>,
}

impl FileWriter {
    /// Begins a file, in the format of its suffix. Waits for another process that writes the same one;
    /// `interrupt` is asked every 20 ms and ends the wait by returning true.
    ///
    /// # Errors
    /// [`Error::UnknownSuffix`], [`Error::Format`] when a tensor cannot be written, [`Error::Write`] when the
    /// system refuses, [`Error::Interrupted`].
    pub fn create(
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: BTreeMap<String, String>,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, Error> {
        // A name without a known suffix has nothing made for it.
        Format::of(path)?;
        Self::begin_file(Claim::new(path, interrupt)?, path, tensors, metadata)
    }

    fn begin_file(
        claim: Claim,
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: BTreeMap<String, String>,
    ) -> Result<Self, Error> {
        let named: Vec<_> = tensors.iter().map(|t| (t.name.as_str(), &t.meta)).collect();
        let (order, header, container) = match Format::of(path)? {
            Format::Container => ((0..tensors.len()).collect(), None, Some(ContainerWriter::new(metadata))),
            Format::Safetensors => {
                let layout = SafetensorsLayout::new(&named, &metadata)?;
                (layout.order, Some(layout.header), None)
            }
        };
        let expected: u64 = tensors.iter().filter_map(|t| t.meta.byte_len()).fold(0, u64::saturating_add);
        let mut file = claim.begin(expected)?;
        if let Some(header) = header {
            file.write(&header)?;
        }
        let mut this = Self { file, tensors, order, at: 0, missing: 0, container };
        this.begin()?;
        Ok(this)
    }

    /// As [`create`](Self::create), but `None` when `path` is there and holds just these tensors and this metadata:
    /// then there is nothing to write. With a `fingerprint` it must be that of the content too. Of several
    /// processes that write the same file, one does and the others wait and get `None`.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn unless_written(
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: &BTreeMap<String, String>,
        fingerprint: Option<u128>,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Self>, Error> {
        let written = |tensors: &[NewTensor]| {
            // Whatever is wrong with a file that is there, it is written anew.
            Checkpoint::open(path).is_ok_and(|there| holds(&there, tensors, metadata, fingerprint))
        };
        if written(&tensors) {
            return Ok(None);
        }
        Format::of(path)?;
        let claim = Claim::new(path, interrupt)?;
        // It may have been written while this waited for its turn.
        if written(&tensors) {
            return Ok(None);
        }
        Self::begin_file(claim, path, tensors, metadata.clone()).map(Some)
    }

    /// Indices of the declared tensors, in the order in which their bytes are expected.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Takes the next bytes: of one tensor or of several, in pieces of any size. Blocks.
    ///
    /// # Errors
    /// [`Error::Write`], and [`Error::Format`] when the tensors have no more bytes.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            if self.at == self.order.len() {
                let (tensor, reason) = (String::new(), "all tensors are complete".into());
                return Err(ts_format::Error::Unwritable { tensor, reason }.into());
            }
            let now = usize::try_from(self.missing).unwrap_or(usize::MAX).min(bytes.len());
            let (piece, later) = bytes.split_at(now);
            if let Some(container) = &mut self.container {
                container.feed(piece)?;
            }
            self.file.write(piece)?;
            self.missing -= now as u64;
            bytes = later;
            if self.missing == 0 {
                self.at += 1;
                self.begin()?;
            }
        }
        Ok(())
    }

    /// Makes the file durable and gives it its name, replacing what had it.
    ///
    /// # Errors
    /// [`Error::Format`] when bytes are missing, [`Error::Write`]. What had the name before still has it then, unless it
    /// is only the directory that cannot be brought to the disk.
    pub fn commit(mut self) -> Result<(), Error> {
        if self.at < self.order.len() {
            let tensor = self.tensors[self.order[self.at]].name.clone();
            let reason = format!("{} of its bytes are missing", self.missing);
            return Err(ts_format::Error::Unwritable { tensor, reason }.into());
        }
        if let Some(container) = self.container {
            let ends = container.finish()?;
            self.file.seek(ends.index_offset)?;
            self.file.write(&ends.index)?;
            self.file.flush()?;
            self.file.seek(0)?;
            self.file.write(&ends.superblocks)?;
        }
        self.file.commit()
    }

    /// Begins the tensor at `at`, and those behind it as long as they are empty.
    fn begin(&mut self) -> Result<(), Error> {
        while let Some(&index) = self.order.get(self.at) {
            let NewTensor { name, meta, phase } = &self.tensors[index];
            if let Some(container) = &mut self.container {
                let offset = container.begin(name, meta.clone(), *phase)?;
                self.file.seek(offset)?;
            }
            self.missing = meta.byte_len().expect("layout and container checked it");
            if self.missing > 0 {
                break;
            }
            self.at += 1;
        }
        Ok(())
    }
}
