// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loading of tensors as views of mapped files.

use std::sync::Arc;

use ts_format::FileId;
use ts_io::FileMapping;

use super::bytes::LoadedBytes;
use super::{LoadOptions, Loaded, PIECE_BYTES, is_aligned};
use crate::pieces::{Threads, for_each_piece};
use crate::progress::Watch;
use crate::read::{Reader, ReaderPool};
use crate::{Checkpoint, Error};

impl Checkpoint {
    /// Loads all tensors like [`load`](Self::load), but returns views of mapped files where
    /// possible. Blocks until these are in the page cache, and have been compared with their
    /// checksums.
    ///
    /// `files` are mappings of [`sources`](Self::sources). Tensors of other sources are loaded as
    /// by `load`, and so are compressed tensors, and those that are not aligned for their element
    /// type.
    ///
    /// Views take no memory but the page cache, whose pages the system need not clear first. This
    /// is the fastest way to load a file once. If memory is short, the system drops pages, and
    /// reads them again when they are accessed. Writing to a view copies its pages, and does not
    /// change the file.
    ///
    /// ```no_run
    /// use std::sync::Arc;
    ///
    /// use tensorstream::io::FileMapping;
    /// use tensorstream::{Checkpoint, LoadOptions};
    ///
    /// let checkpoint = Checkpoint::open("model.safetensors")?;
    /// // SAFETY: nothing writes to the file while this program runs.
    /// let file = unsafe { FileMapping::new(&checkpoint.sources()[0]) }?;
    /// let tensors =
    ///     checkpoint.load_mapped(&[Arc::new(file)], LoadOptions::default(), &mut |_| false)?;
    /// # Ok::<(), tensorstream::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load).
    pub fn load_mapped(
        &self,
        files: &[Arc<FileMapping>],
        options: LoadOptions,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<Loaded>, Error> {
        let mapping = |file: FileId| {
            let source = &self.sources()[file.0 as usize];
            files.iter().find(|mapping| Arc::ptr_eq(mapping.source(), source))
        };
        let (mut views, mut others) = (Vec::new(), Vec::new());
        for tensor in self.catalog().tensors_by_offset() {
            let range = tensor.range();
            let can_view = !range.is_virtual() && range.len > 0 && is_aligned(tensor);
            match mapping(range.file).filter(|_| can_view) {
                Some(mapping) => views.push((tensor, mapping)),
                None => others.push(tensor),
            }
        }
        let lens: Vec<u64> = views.iter().map(|(tensor, _)| tensor.range().len).collect();
        let fill = |reader: &mut Reader, index: usize, begin: u64, len: usize| {
            let (tensor, mapping) = views[index];
            let at = (tensor.range().offset + begin) as usize;
            mapping.populate(at..at + len)?;
            match options.verify {
                true => reader.check(self, tensor, begin, &mapping[at..at + len]),
                false => Ok(()),
            }
        };
        let init = ReaderPool::reader;
        let threads = Threads::for_storage(options.jobs);
        for_each_piece(&lens, PIECE_BYTES, threads, watch, init, fill, |_, _, ()| ())?;
        files.iter().try_for_each(|mapping| mapping.verify())?;
        let mut loaded = self.load_tensors(others, options, watch)?;
        loaded.extend(views.iter().map(|&(tensor, mapping)| {
            let begin = tensor.range().offset as usize;
            let range = begin..begin + tensor.range().len as usize;
            Loaded::new(tensor, LoadedBytes::mapped(Arc::clone(mapping), range))
        }));
        loaded.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(loaded)
    }
}
