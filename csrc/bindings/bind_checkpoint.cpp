#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bindings/bytes.h"
#include "csrc/checkpoint/crc32.h"
#include "csrc/checkpoint/file_reader.h"
#include "csrc/checkpoint/file_writer.h"
#include "csrc/checkpoint/slice_plan.h"
#include "csrc/checkpoint/tensor_io.h"

namespace py = pybind11;

namespace smp::bindings {
namespace {

using checkpoint::FileReader;
using checkpoint::FileWriter;
using checkpoint::Part;
using checkpoint::SliceRead;
using NoGil = py::call_guard<py::gil_scoped_release>;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::tuple<int64_t, std::vector<uint32_t>> finish(FileWriter& writer) {
  auto record = writer.finish();
  return {record.num_bytes, std::move(record.crc32s)};
}

void bind_plans(py::module_& m) {
  py::class_<SliceRead>(
      m, "SliceRead",
      "num_runs copies of run_length elements out of one stored slice.")
      .def_readonly("source_idx", &SliceRead::source_idx);
  py::class_<Part>(m, "Part",
                   "Elements [begin, begin + numel) of a flattened slice.")
      .def(py::init([](topology::ShardInterval interval, int64_t begin,
                       int64_t numel, std::vector<int64_t> view) {
             return Part{interval, begin, numel, std::move(view)};
           }),
           py::arg("interval"), py::arg("begin"), py::arg("numel"),
           py::arg("view") = std::vector<int64_t>{})
      .def_readonly("interval", &Part::interval)
      .def_readonly("begin", &Part::begin)
      .def_readonly("numel", &Part::numel)
      .def_readonly("view", &Part::view)
      .def("__repr__", &Part::describe);
  m.def("plan_part_reads", &checkpoint::plan_part_reads, py::arg("shape"),
        py::arg("stored"), py::arg("wanted"), NoGil(),
        "The reads that make up a part of a tensor from stored parts.");
}

void bind_files(py::module_& m) {
  m.def(
      "crc32",
      [](Bytes data, uint32_t crc) {
        py::gil_scoped_release release;
        return checkpoint::crc32(bytes_of(data.view), crc);
      },
      py::arg("data"), py::arg("crc") = 0, "As zlib.crc32.");
  m.def("copy_tensor", &checkpoint::copy_tensor, py::arg("into"),
        py::arg("source"), NoGil(),
        "Copies a tensor into one on the CPU with the same layout.");
  py::class_<FileWriter>(m, "FileWriter",
                         "Writes a file through buffers and a thread.")
      .def(py::init([](std::string path, int64_t buffer_bytes, int num_buffers,
                       int64_t chunk_bytes) {
             return std::make_unique<FileWriter>(
                 std::move(path), checkpoint::FileWriterOptions{
                                      buffer_bytes, num_buffers, chunk_bytes});
           }),
           py::arg("path"), py::arg("buffer_bytes"), py::arg("num_buffers"),
           py::arg("chunk_bytes"))
      .def(
          "append",
          [](FileWriter& writer, Bytes data) {
            py::gil_scoped_release release;
            writer.append(bytes_of(data.view));
          },
          py::arg("data"))
      .def("append_tensor", &checkpoint::append_tensor, py::arg("tensor"),
           NoGil())
      .def("take_crc32", &FileWriter::take_crc32)
      .def("finish", &finish, NoGil(),
           "Number of bytes, and the CRC-32 of each chunk.")
      .def("abandon", &FileWriter::abandon, NoGil())
      .def_property_readonly("position", &FileWriter::position)
      .def_property_readonly("bytes_written", &FileWriter::bytes_written);
  py::class_<FileReader>(m, "FileReader",
                         "Reads ranges of a file and checks their chunks.")
      .def(py::init([](std::string path, int64_t num_bytes, int64_t chunk_bytes,
                       std::vector<uint32_t> crc32s) {
             return std::make_unique<FileReader>(
                 std::move(path), checkpoint::FileRecord{num_bytes, chunk_bytes,
                                                         std::move(crc32s)});
           }),
           py::arg("path"), py::arg("num_bytes"), py::arg("chunk_bytes"),
           py::arg("crc32s"))
      .def("read", &checkpoint::read_tensor, py::arg("offset"), py::arg("into"),
           NoGil())
      .def("read_slice", &checkpoint::read_slice, py::arg("read"),
           py::arg("block_offset"), py::arg("into"), NoGil());
}

}  // namespace

void bind_checkpoint(py::module_& m) {
  bind_plans(m);
  bind_files(m);
}

}  // namespace smp::bindings
